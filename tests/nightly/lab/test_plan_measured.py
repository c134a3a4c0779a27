"""What a plan measures of communication and of the methods' own work, and how it runs each of them in turns."""

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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.lab.bench import bandwidth
from lightning_pipesync.lab.bench.bandwidth import JobSockets, measure_bandwidth
from lightning_pipesync.lab.bench.candidates import Candidate, MethodCandidate
from lightning_pipesync.lab.bench.models import BenchModel, build_model, stand_in
from lightning_pipesync.lab.bench.timing import StepRecorder
from lightning_pipesync.lab.plan import trials
from lightning_pipesync.lab.plan import work as plan_work
from lightning_pipesync.lab.plan.costs import Costs, measure_links
from lightning_pipesync.lab.plan.model import PlanSettings, Replicas
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.trials import candidate_of, run_in_turns
from lightning_pipesync.lab.plan.work import measure_added, measure_work, with_refusals
from lightning_pipesync.lab.predictions.cluster import BackendCost, Cluster, MeasuredCost
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.lab.predictions.work import LayerWork, MethodWork, Work
from lightning_pipesync.training.registry import METHODS
from tests.quick.lab.test_plan import PROFILE, WORK, cluster, small_model
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, launch, raised

SMALL = PlanSettings("tests.quick.lab.test_plan:small_model", 1.0, 1.0, 2, 2)

# --- without other ranks ----------------------------------------------------------------------------------------------


LAYERED = Work(PROFILE, {"ea_pipe": MethodWork(layers=[LayerWork(0.01, 1, 1)] * 3)})


def free_cluster(world_size: int = 2, bandwidth: float = 1e9) -> Cluster:
    link = MeasuredCost(0.0, 0.0)
    return Cluster(world_size, bandwidth, BackendCost(0.0, 0.0), link, {"none": link})


def test_a_wait_after_the_last_gradient_is_no_computation() -> None:
    """As in DDP, whose backward pass ends when the others' gradients have come."""
    module = nn.Linear(2, 2)
    recorder = StepRecorder(module, Clock(torch.device("cpu")))
    for _ in range(3):
        recorder.begin_forward()
        loss = module(torch.ones(2)).sum()
        recorder.begin_backward()
        loss.backward()
        time.sleep(0.05)
        recorder.begin_update()
        assert recorder.end()
    profile = recorder.profile()
    assert profile.backward == max(tensor.ready for tensor in profile.tensors)
    assert recorder.num_steps == 3
    recorder.begin_forward()
    assert not recorder.end()  # a batch that is accumulated


# --- on two ranks -----------------------------------------------------------------------------------------------------


def layers_of_models() -> tuple[Work, Work]:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    batch = (torch.randn(16, 4), torch.randn(16, 2))
    model = BenchModel("own", module, [], lambda rank: batch, lambda module, b: (module(b[0]) - b[1]).square().mean())
    return measure_work(model), measure_work(replace(model, module=nn.Linear(4, 2)))


def costs_of_exchanges() -> dict[str, list[str]]:
    measured, found = Costs([2**12, 2**14, 2**16], torch.device("cpu")), {}
    for method in METHODS.values():
        for exchange in lab_of(method.name).exchanges:
            costs = measured.of_exchange(method, exchange)
            assert all(cost.all_reduce(2**16, 2) > 0 for cost in costs.values())
            found[exchange.name] = list(costs)
    return found


def added_to(num_layers: int) -> dict[str, float]:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    with patch.object(plan_work, "STEPS", 2), patch.object(plan_work, "ROUNDS", 2):
        return measure_added(module, LAYERED, free_cluster(dist.get_world_size()))


ALL = [
    Prediction("ddp", {"bucket_mb": 1.0}),
    Prediction("dear", {"fusion": "buffer", "bucket_mb": 1.0}),
    Prediction("pipe_sgd", {"compression": "int8"}, exact=False),
    Prediction("selsync", {"lssr": 0.75}, exact=False),
    Prediction("local_sgd", {"period": 4, "fragments": 2, "overlap_steps": 2}, exact=False),
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
        found.append((candidate.period, not all(map(torch.equal, before, after))))
        candidate.close()
    return found


def refused_without_layers() -> tuple[str, str] | None:
    model = BenchModel("own", nn.Linear(2, 2), [], lambda rank: torch.ones(2), lambda module, b: module(b).sum())
    return raised(lambda: candidate_of(ALL[-1], model))


def decisions(lssr: float, steps: int) -> list[bool]:
    candidate: Any = candidate_of(Prediction("selsync", {"lssr": lssr}), small())
    candidate.step()  # the change of the first gradient is not defined
    taken = []
    for _ in range(steps):
        candidate.step()
        taken.append(candidate.sync.last.synchronized)
    candidate.close()
    return taken


class Failing(Candidate):
    """Fails in its first step, on all ranks."""

    def step(self) -> None:
        raise RuntimeError("no way")


class Large(Candidate):
    """Does not fit in the memory that is left, on one rank."""

    def step(self) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory")


class FailingLater(MethodCandidate):
    """Fails in the third step that is timed."""

    _left: int | None = None

    def drain(self) -> None:
        super().drain()
        self._left = 4 if self._left is None else self._left  # one of them begins a measurement

    def step(self, batch: Any = None) -> None:
        if self._left == 0:
            raise RuntimeError("no way")
        self._left = None if self._left is None else self._left - 1
        super().step(batch)


CHOSEN = [Prediction("ddp", {"bucket_mb": 1.0}), Prediction("dear", {"fusion": "buffer"}), Prediction("pipe_sgd")]


def prove(fault: type[Candidate], ranks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Returns what is measured if the second method fails on these ranks."""
    make = trials.candidate_of

    def candidate(one: Prediction, model: BenchModel, replicas: Replicas) -> Candidate:
        if one is CHOSEN[1] and fault is not FailingLater:
            return fault("", model)
        made = make(one, model, replicas)
        if one is CHOSEN[1] and dist.get_rank() in ranks:
            made.__class__ = FailingLater
        return made

    with patch.object(trials, "candidate_of", candidate):
        if fault is not Large:
            return run_in_turns(CHOSEN, SMALL, lambda _: None)
        of_all = trials.Trials(SMALL)
        assert [of_all.begin(one) for one in CHOSEN] == [True, False, False], "others would not fit, either"
        return of_all.time(lambda _: None)


def refused_by(num_layers: int) -> tuple[dict[str, str], list[str]]:
    """What methods refuse for a model of so many layers; and what is predicted and cannot be attached."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    averages = dict.fromkeys(("none", "int8", "int4"), MeasuredCost(1e-3, 1e-7))
    at = replace(cluster(1e7, 2), exchanges={"averages": averages})
    work = with_refusals(WORK, at, module)
    failed = []
    for one in predict(work, at):
        try:
            candidate_of(one, stand_in(module)).close()
        except ValueError as error:
            failed.append(str(error))
    return dict(work.refused), failed


def measured_without_rank_1(what: str) -> str:
    """Rank 1 tells its address, and does not answer."""
    with patch.object(bandwidth, "TIMEOUT_S", 1.0):
        said = ""
        if dist.get_rank() == 0:
            try:
                measure_bandwidth() if what == "bandwidth" else measure_links(1e9)
            except RuntimeError as error:
                said = str(error)
            dist.barrier()
        else:
            with JobSockets(backlog=1):
                if what == "links":
                    dist.barrier()
                dist.barrier()  # until rank 0 has given up
    return said


#: By name, the class of the second method that fails, and the ranks on which it does.
FAULTS: dict[str, tuple[type[Candidate], tuple[int, ...]]] = {
    "at once": (Failing, (0, 1)),
    "later": (FailingLater, (0, 1)),
    "later on one rank": (FailingLater, (1,)),
    "memory": (Large, (1,)),
}


@pytest.fixture(scope="module")
def found() -> Outcomes:
    cases: dict[Any, Any] = {"layers": layers_of_models, "exchanges": costs_of_exchanges, "all": steps_of_all}
    cases |= {("added", layers): partial(added_to, layers) for layers in (1, 3)}
    cases |= {lssr: partial(decisions, lssr, 12) for lssr in SHARES} | {"refused": refused_without_layers}
    cases |= {name: partial(prove, *fault) for name, fault in FAULTS.items()}
    cases |= {("refused", layers): partial(refused_by, layers) for layers in (2, 4)}
    return launch_cases(cases | {what: partial(measured_without_rank_1, what) for what in ("bandwidth", "links")}, 2)


def test_what_methods_measure_of_the_model(found: Outcomes) -> None:
    """Pipelines the layers of a Sequential, Pipe-SGD its prediction of weights, replicas and servers an exchange."""
    work, of_linear = found["layers"][0]
    layers = work.measured["ea_pipe"].layers
    assert [(one.parameter_bytes, one.output_bytes) for one in layers] == [(160, 512), (0, 512), (72, 128)]
    assert all(one.seconds > 0 for one in layers)
    assert set(of_linear.measured) == {"pipe_sgd"}
    assert work.measured["pipe_sgd"].seconds > 0
    assert found["exchanges"] == [{"averages": ["none", "int8", "int4"], "push and pull": ["none"]}] * 2


@pytest.mark.parametrize(("layers", "pipelines"), [(1, False), (3, True)])
def test_what_methods_add_is_the_same_on_all_ranks(layers: int, pipelines: bool, found: Outcomes) -> None:
    first, second = found["added", layers]
    assert first == second
    assert {"ddp", "dear", "pipe_sgd", "selsync", "local_sgd"} <= set(first)
    assert ("ea_pipe" in first) == pipelines
    assert all(seconds >= 0 for seconds in first.values())
    assert any(seconds > 0 for seconds in first.values())


#: By the share of SelSync's steps that are local, the steps of a cycle, and how many of 12 are synchronized.
SHARES = {0.5: (2, 6), 0.75: (4, 3), 0.9: (10, 1)}


def test_all_methods_that_are_planned_train(found: Outcomes) -> None:
    """A share of SelSync's steps is local; a pipeline needs layers."""
    assert set(found["all"][0]) == {(1, True), (4, True)}
    for outcome in found["refused"]:
        assert_raised(outcome, "ValueError", "Linear is not an nn.Sequential", "split='balanced'")
    for lssr, (period, synchronized) in SHARES.items():
        for taken in found[lssr]:
            assert sum(taken) == synchronized
            assert all(b - a == period for a, b in pairwise(i for i, one in enumerate(taken) if one))


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "memory"])
def test_a_trial_that_fails_is_a_row_with_its_error(fault: str, found: Outcomes) -> None:
    """On all ranks alike, though on one of them it may be the other's error."""
    first, second = found[fault]
    ddp, dear, pipe_sgd = (first[name] for name in ("ddp:bucket_mb=1.0", "dear:fusion=buffer", "pipe_sgd"))
    assert len(first) == 3
    assert list(dear) == ["error"]
    assert "no way" in dear["error"]
    assert second["dear:fusion=buffer"] == dear
    assert len(ddp["seconds"]) == len(pipe_sgd["seconds"]) == 2
    if fault == "at once":
        size = 4 * (64 * 64 + 64 + 64 + 1)
        assert 3 * size < ddp["resident_bytes"] < pipe_sgd["resident_bytes"] < 12 * size


def test_tensors_without_memory_are_not_counted() -> None:
    """Those that a compiler has kept of what it traced."""
    with FakeTensorMode():
        kept = torch.ones(1 << 40)
    assert trials.resident_bytes() < kept.nbytes


def test_what_does_not_fit_beside_others_is_no_fault_of_the_method(found: Outcomes) -> None:
    for measured in found["memory"]:
        assert list(measured) == ["ddp:bucket_mb=1.0", "dear:fusion=buffer"]
        assert len(measured["ddp:bucket_mb=1.0"]["seconds"]) == 2
        assert "does not fit in memory beside 1 others" in measured["dear:fusion=buffer"]["error"]


def test_what_a_method_refuses_is_not_planned(found: Outcomes) -> None:
    """Two layers cannot be averaged in four fragments, whatever the period."""
    assert found["refused", 4] == [({}, [])] * 2
    for refused, failed in found["refused", 2]:
        assert failed == []
        assert refused
        for name, reason in refused.items():
            assert "fragments=4" in name
            assert "fragments=4 is more than the 2 layers" in reason


def test_who_does_not_answer_is_not_waited_for(found: Outcomes) -> None:
    assert "Rank 0 timed out waiting for rank 1 or 1 (1 s)" in found["bandwidth"][0]
    assert "Rank 0 does not reach rank 1, at" in found["links"][0]


def fail_in_ddp() -> Any:
    """One rank fails before the backward pass, in which DDP has the others wait for it."""

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no way")
        return module(batch).square().mean()

    module, batch, _ = small_model()
    model = BenchModel("", module, [], lambda rank: batch, loss)
    with patch.object(PlanSettings, "build", lambda *_: model), patch.object(trials, "TIMEOUT_S", 3.0):
        trials.Trials(PlanSettings()).begin(Prediction("ddp", {"bucket_mb": 1.0}))


def test_a_rank_that_fails_alone_in_ddp_says_so() -> None:
    """Nobody can tell the others, which its launcher ends."""
    outcomes = launch(partial(raised, fail_in_ddp), 2, group_timeout_s=10)
    said = "ddp:bucket_mb=1.0 failed on rank 1, while other ranks wait in it: RuntimeError: no way"
    assert_raised(outcomes[1], "RuntimeError", said)
