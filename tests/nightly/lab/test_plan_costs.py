"""What a plan measures of communication and of the methods' own work, and how it runs each of them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync.core.cluster import BackendCost, Cluster, MeasuredCost, compression_of
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.work import LayerWork, MethodWork, Work
from lightning_pipesync.lab.bench.models import BenchModel, build_model, stand_in
from lightning_pipesync.lab.plan import costs, measure, stand_ins
from lightning_pipesync.lab.plan.costs import measure_exchange, measure_in_a_row, sizes_for
from lightning_pipesync.lab.plan.replicas import Replicas
from lightning_pipesync.lab.plan.stand_ins import measure_added
from lightning_pipesync.lab.plan.trials import candidate_of
from lightning_pipesync.lab.plan.work import activation_bytes
from lightning_pipesync.methods.laboratory import Prediction, StandIn
from lightning_pipesync.methods.local_sgd.lab import OUTER
from lightning_pipesync.methods.selsync.lab import WithShareOfLocalSteps
from lightning_pipesync.training.registry import METHODS
from tests.nightly.lab.test_plan import PROFILE
from tests.support.case_table import launch_cases
from tests.support.harness import assert_refused, call_on_hosts, on_ranks, raised

MIB = 2**20

# --- costs ------------------------------------------------------------------------------------------------------------


def exchanges_that_are_measured() -> dict[str, Any]:
    """Returns by codec how the ranks exchange when its all-reduce is measured."""
    with (
        patch.object(measure, "_all_reduce", lambda transport, _: str(transport.topology)),
        patch.object(measure, "measure_one_by_one", lambda topology, *_: topology),
        patch.object(measure, "measure_in_a_row"),
        patch.object(measure, "measure_backend"),
        patch.object(measure, "measure_bandwidth", lambda **_: 1e9),
        patch.object(measure, "measure_exchange"),
        patch.object(measure, "gathered", lambda cluster: [cluster]),
    ):
        return dict(measure.measure_cluster(torch.device("cpu"), 2**20).all_reduces)


def test_codecs_are_measured_as_methods_use_them() -> None:
    """Among hosts with several ranks, a host compresses its sum."""
    rows = "torus2d with rows of 2 ranks"
    expected = {"none": "flat", "bf16": rows, "int8": rows, "int4": rows}
    assert on_ranks(call_on_hosts, 4, 2, exchanges_that_are_measured) == [expected] * 4


def test_a_cost_is_as_measured_among_as_many_ranks() -> None:
    """Four sizes of all-reduces on a line, of which one took twice as long."""
    line, sizes = LinkCost(1e-4, 1e-8), [2**16, 2**18, 2**20, 2**22]
    seconds = [(2 if size == 2**18 else 1) * line.all_reduce(size, 8) for size in sizes]
    cost = MeasuredCost.measured(sizes, seconds, 8, halves=2)
    for size, took in zip(sizes, seconds, strict=True):
        assert cost.all_reduce(size, 8) == pytest.approx(took)
        assert cost.reduce_scatter(size, 8) == pytest.approx(took / 2)
    between = cost.all_reduce(2**19, 8) / line.all_reduce(2**19, 8)
    assert between == pytest.approx(1.5, rel=0.05)
    fitted = LinkCost(cost.alpha, cost.beta)
    assert cost.all_reduce(2**18, 4) == fitted.all_reduce(2**18, 4), "among other ranks it is the line"
    slower = replace(cost, beta=2 * cost.beta)
    assert slower.all_reduce(2**22, 8) == pytest.approx(2 * seconds[-1], rel=0.05)


def test_wires_that_are_gathered_grow_with_the_number_of_ranks() -> None:
    """P - 1 times all that is encoded, where others send 2 (P - 1) / P of it."""
    ratio = 16384 / 120
    assert compression_of("chunked_topk", 2) == pytest.approx(ratio)
    assert compression_of("chunked_topk", 8) == pytest.approx(ratio / 4)
    assert compression_of("int8", 8) == compression_of("int8", 2)
    size, bandwidth, at_4 = 2**30, 1e8, compression_of("chunked_topk", 4)
    links = {"chunked_topk": LinkCost(0.0, 1 / at_4 / bandwidth), "none": LinkCost(0.0, 1 / bandwidth)}
    at = Cluster(4, bandwidth, BackendCost(0.0, 1 / bandwidth), links["none"], links)
    for hosts in (4, 16):
        cluster = at.with_hosts(hosts)
        seconds = (hosts - 1) * size / ratio / bandwidth
        assert cluster.all_reduces["chunked_topk"].all_reduce(size, hosts) == pytest.approx(seconds)
        assert cluster.seconds_on_wire(size, "chunked_topk") == pytest.approx(seconds)
        assert cluster.all_reduces["none"] == links["none"]
        half = cluster.with_bandwidth(bandwidth / 2).all_reduces["chunked_topk"]
        assert half.all_reduce(size, hosts) == pytest.approx(2 * seconds)


def test_half_an_all_reduce() -> None:
    line = LinkCost(1e-4, 1e-8)
    cost = MeasuredCost.measured([2**18, 2**20], [line.all_gather(2**18, 4), line.all_gather(2**20, 4)], 4, halves=1)
    assert cost.all_gather(2**19, 4) == pytest.approx(line.all_gather(2**19, 4))


def test_sizes_are_those_of_the_gradients_and_take_little_time() -> None:
    assert sizes_for(2**24, 1e9) == [2**18, 2**20, 2**22, 2**24]
    assert sizes_for(2**30, 1e9)[-1] == costs.MOST_BYTES
    assert sizes_for(2**30, 1e7)[-1] == costs.LARGEST_S * 1e7
    assert sizes_for(8, 1e9)[-1] == costs.LEAST_BYTES


class Sleeping:
    """An operation that takes as long as it is large, one after the other."""

    free = 0.0

    def __init__(self, flat: torch.Tensor) -> None:
        Sleeping.free = self.end = max(time.perf_counter(), Sleeping.free) + flat.nbytes * 1e-7

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))


def sleeping() -> MeasuredCost:
    return measure_in_a_row(Sleeping, [2**16, 2**18], "cpu", halves=1)


def test_operations_in_a_row_are_measured() -> None:
    for cost in on_ranks(sleeping, 2):
        for size in (2**16, 2**18):
            assert cost.all_gather(size, 2) >= 0.9 * size * 1e-7  # a busy machine sleeps for longer


def costs_of_exchanges() -> dict[str, dict[str, MeasuredCost]]:
    sizes, cpu = [2**12, 2**14, 2**16], torch.device("cpu")
    return {
        exchange.name: measure_exchange(method, exchange, sizes, cpu)
        for method in METHODS.values()
        for exchange in method.lab(method).exchanges
    }


def test_what_methods_exchange_is_measured() -> None:
    for measured in on_ranks(costs_of_exchanges, 2):
        assert {name: list(by_codec) for name, by_codec in measured.items()} == {
            "averages": ["none", "int8", "int4"],
            "push and pull": ["none"],
        }
        assert all(0 < cost.all_reduce(2**16, 2) < 10 for by_codec in measured.values() for cost in by_codec.values())


# --- what methods add to a step ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, a third, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.frozen = (nn.Linear(8, 8) for _ in range(4))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)


@pytest.mark.parametrize(("scale", "values"), [(0.0, 5), (1.0, 64 + 8 + 8 + 64 + 8), (0.5, 32 + 4 + 4 + 32 + 4)])
def test_a_stand_in_has_as_many_layers_and_tensors(scale: float, values: int) -> None:
    model = stand_in(Tied(), scale)
    parameters = list(model.module.parameters())
    assert len(parameters) == 5
    assert sum(parameter.numel() for parameter in parameters) == values
    assert len(model.layers) == 3
    model.loss(model.module, model.make_batch(0)).backward()
    assert all(parameter.grad is not None for parameter in parameters)


LAYERED = Work(PROFILE, {"ea_pipe": MethodWork(layers=[LayerWork(0.01, 1, 1)] * 3)})


def free_cluster(world_size: int = 2, bandwidth: float = 1e9) -> Cluster:
    link = LinkCost(0.0, 0.0)
    return Cluster(world_size, bandwidth, BackendCost(0.0, 0.0), link, {"none": link})


def added_to(num_layers: int) -> dict[str, float]:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    with patch.object(stand_ins, "STEPS", 2), patch.object(stand_ins, "ROUNDS", 3):
        return measure_added(module, LAYERED, free_cluster(dist.get_world_size()))


def test_what_methods_add_is_the_same_on_all_ranks() -> None:
    outcomes = launch_cases({layers: partial(added_to, layers) for layers in (1, 3)}, 2)
    for layers, pipelines in ((1, False), (3, True)):
        first, second = outcomes[layers]
        assert first == second
        assert {"ddp", "dear", "pipe_sgd", "selsync", "local_sgd"} <= set(first)
        assert ("ea_pipe" in first) == pipelines
        assert all(seconds >= 0 for seconds in first.values())
        assert any(seconds > 0 for seconds in first.values())


def test_what_pipelines_add_is_measured_where_they_are_planned() -> None:
    def measure(module: nn.Module, scale: float, declared: dict[str, StandIn], _: Replicas) -> dict[str, list[float]]:
        return {name: [1.0] for name in declared}

    with patch.object(stand_ins, "_measure", measure):
        assert "ea_pipe" not in measure_added(nn.Linear(2, 2), Work(PROFILE), free_cluster())
        assert measure_added(nn.Linear(2, 2), LAYERED, free_cluster())["ea_pipe"] == 1.0


@pytest.mark.parametrize(
    ("large", "added"), [([0.002, 0.003, 0.01], 0.002), ([0.004, 0.006, 0.008], 0.002 + 0.004 * 100)]
)
def test_noise_is_not_multiplied(large: list[float], added: float) -> None:
    """Of a stand-in with a hundredth of the values: what it takes longer counts if it is more than rounds differ by."""
    module, values = nn.Linear(2**14, 100), 2**14 * 100 + 100

    def measure(module: nn.Module, scale: float, declared: dict[str, StandIn], _: Replicas) -> dict[str, list[float]]:
        return {name: [0.001, 0.002, 0.003] if scale == 0 else large for name in declared}

    with patch.multiple(stand_ins, _measure=measure, MOST_BYTES=4 * values // 100, MOST_SECONDS=1e9):
        found = measure_added(module, Work(PROFILE), free_cluster(bandwidth=1e5))
    assert found["local_sgd"] == pytest.approx(added, rel=1e-3)


def test_activations_are_what_is_kept_for_the_backward_pass() -> None:
    """A linear layer and a ReLU keep its output; the batch and the weights are there anyway."""
    module, batch = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(8, 16)
    model = BenchModel("own", module, [], lambda rank: batch, lambda module, batch: module(batch).sum())
    assert activation_bytes(model, batch) == 4 * 8 * 32


# --- what is run ------------------------------------------------------------------------------------------------------

ALL = [
    Prediction("ddp", {"bucket_mb": 1.0}),
    Prediction("dear", {"fusion": "buffer", "bucket_mb": 1.0}),
    Prediction("pipe_sgd", {"compression": "int8"}, exact=False),
    Prediction("selsync", {"lssr": 0.75, "outer_momentum": 0.3}, exact=False),
    Prediction("local_sgd", {"period": 4, **OUTER, "fragments": 2, "overlap_steps": 2}, exact=False),
    Prediction("parameter_server", {"partition": "work_queue"}, exact=False),
    Prediction("ea_pipe", {}, exact=False),
]


def small() -> BenchModel:
    return build_model("emulated-resnet50", scale=1e-3, forward_seconds=0.0, backward_seconds=0.0)


def steps_of_all() -> list[tuple[int, bool]]:
    found = []
    for one in ALL:
        candidate = candidate_of(one, small())
        before = [parameter.clone() for parameter in candidate.model.module.parameters()]
        candidate.prepare()
        candidate.begin()
        for _ in range(candidate.period):
            candidate.step()
        candidate.drain()
        after = list(candidate.model.module.parameters())
        found.append((candidate.period, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))))
        candidate.close()
    return found


def decisions(lssr: float, steps: int) -> list[bool]:
    candidate: Any = candidate_of(Prediction("selsync", {"lssr": lssr}), small())
    assert isinstance(candidate.declared, WithShareOfLocalSteps)
    candidate.step()  # the change of the first gradient is not defined
    taken = []
    for _ in range(steps):
        candidate.step()
        taken.append(candidate.sync.last.synchronized)
    candidate.close()
    return taken


def refused() -> tuple[str, str] | None:
    model = BenchModel("own", nn.Linear(2, 2), [], lambda rank: torch.ones(2), lambda module, b: module(b).sum())
    return raised(lambda: candidate_of(ALL[-1], model))


def test_candidates_take_steps() -> None:
    """All methods that are planned train; a share of SelSync's steps is local; a pipeline needs layers."""
    expected = {0.5: (2, 6), 0.75: (4, 3), 0.9: (10, 1)}
    cases = {lssr: partial(decisions, lssr, 12) for lssr in expected}
    outcomes = launch_cases({"all": steps_of_all, "refused": refused, **cases}, 2)
    assert set(outcomes["all"][0]) == {(1, True), (4, True)}
    for message in outcomes["refused"]:
        assert_refused(
            {"Linear is not an nn.Sequential, and split='balanced' does not say where to divide it": message}
        )
    for lssr, (period, synchronized) in expected.items():
        for taken in outcomes[lssr]:
            assert sum(taken) == synchronized
            at = [i for i, one in enumerate(taken) if one]
            assert all(b - a == period for a, b in pairwise(at))
