"""What a stage does with unusual layers, settings and batches; virtual stages stand in for processes."""

from __future__ import annotations

import io
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync import EAPipe
from lightning_pipesync.core import layers as chain
from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from tests.support.case_table import Outcomes, launch_cases
from tests.support.ea_pipe_runs import (
    ASYNCHRONOUS,
    CUTS,
    OPTIMIZERS,
    assert_equal,
    assert_same_weights,
    average_elastically,
    engine_on,
    layers,
    train_on,
)
from tests.support.harness import assert_refused, raised
from tests.support.models import batch


class Pair(nn.Module):
    """Passes on nested tuples, in which not everything needs a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.tanh(), {"mask": x > 0, "again": (2 * x,), "name": "kept"}


class Join(nn.Module):
    def forward(self, parts: tuple[Tensor, dict[str, Any]]) -> Tensor:
        x, rest = parts
        assert rest["name"] == "kept"
        return x * rest["mask"] + rest["again"][0]


def unusual(seed: int = 0) -> nn.Sequential:
    """Dropout, BatchNorm, a first layer of a stage that works in place, and nested activations, of which one unused."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(inplace=True), nn.Sequential(nn.Dropout(0.3), Pair()),
        Join(), nn.Linear(10, 10), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(10, 3),
    )  # fmt: skip


#: The later stages begin with the ReLU in place, the layer that takes a nested tuple, and the other ReLU.
UNUSUAL_CUTS = (2, 5, 7)


def train(settings: dict[str, Any], virtual_stages: int | None, num_steps: int = 14) -> dict[str, Tensor]:
    """The whole master; the last batches are smaller."""
    model = unusual()
    engine = engine_on(model, virtual_stages=virtual_stages, **{"split": UNUSUAL_CUTS, **settings})
    for t in range(num_steps):
        engine.train_batch(batch(t, 0, size=8 if t < 10 else 5))
    model.eval()
    output = engine.forward(batch(100, 0)[0])
    engine.gather()
    engine.detach()
    return {**model.state_dict(), **({} if output is None else {"output": output})}


SETTINGS: dict[str, dict[str, Any]] = {
    **{one: {"algorithm": one} for one in ASYNCHRONOUS},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "clipped": {"clip_norm": 0.1},
    "pipedream, clipped": {"algorithm": "pipedream", "clip_norm": 0.1},
    "more replicas, clipped": {"replicas": 7, "clip_norm": 0.1},
}


def test_virtual_stages_are_processes_with_any_layers() -> None:
    """Dropout and BatchNorm's averages included, and all ranks have the whole master."""
    on_processes = launch_cases({name: partial(train, settings, None) for name, settings in SETTINGS.items()}, 4)
    for name, settings in SETTINGS.items():
        virtual = train(settings, 4)
        for rank, outcome in enumerate(on_processes[name]):
            for key, value in outcome.items():
                assert torch.equal(value, virtual[key]), f"{name}: {key} on rank {rank}"
            assert ("output" in outcome) == (rank == 0)


def update_clipped(replica: nn.Module, optimizer: Optimizer, t: int) -> None:
    x, y = batch(t, 0)
    optimizer.zero_grad()
    nn.functional.cross_entropy(replica(x), y).backward()
    nn.utils.clip_grad_norm_(replica.parameters(), 0.2)
    optimizer.step()


def test_clipping_takes_the_norm_over_all_stages() -> None:
    model = layers()
    engine = engine_on(model, clip_norm=0.2, elastic_force=0.1)
    train_on(engine, range(12))
    engine.flush()
    master = average_elastically(
        layers, lambda replica: OPTIMIZERS["sgd"](replica.parameters()), update_clipped, num_updates=12, force=0.1
    )
    torch.testing.assert_close(list(model.parameters()), list(master.parameters()))


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_parts_of_a_mini_batch_add_up(algorithm: str) -> None:
    """Two passes of half the samples are one of all, at any number of stages, when nothing is in flight between."""
    model, other = layers(), layers()

    def half(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) / 2

    whole = engine_on(model, virtual_stages=3, algorithm=algorithm)
    parts = engine_on(other, loss=half, virtual_stages=3, algorithm=algorithm)
    for t in range(9):
        x, y = batch(t, 0)
        whole.train_batch((x, y))
        parts.train_batch((x[:4], y[:4]), completes=False)
        parts.train_batch((x[4:], y[4:]))
        if algorithm in ("naive", "spectrain"):  # what these see depends on what is in flight
            whole.flush()
            parts.flush()
    whole.flush()
    parts.flush()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize("algorithm", ["ea_pipe", "pipedream", "weight_stashing"])
def test_emptying_the_pipeline_changes_nothing(algorithm: str) -> None:
    engines = [engine_on(unusual(), virtual_stages=4, algorithm=algorithm, split=UNUSUAL_CUTS) for _ in range(2)]
    for t in range(12):
        for engine in engines:
            engine.train_batch(batch(t, 0))
        if t % 3 == 1:
            engines[1].flush()
    assert_same_weights(*engines)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_resumed_run_is_the_uninterrupted_one(settings: dict[str, Any]) -> None:
    model, given = unusual(), {"virtual_stages": 4, "split": UNUSUAL_CUTS, **settings}
    engine = engine_on(model, **given)
    train_on(engine, range(9))
    saved = io.BytesIO()
    state = engine.state_dict()
    torch.save({"engine": state, "model": model.state_dict()}, saved)
    train_on(engine, range(9, 17))
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    resumed = unusual(seed=5)
    resumed.load_state_dict(checkpoint["model"])
    other = engine_on(resumed, **given)
    other.load_state_dict(checkpoint["engine"])
    train_on(other, range(9, 17))
    assert_same_weights(engine, other)


def test_resumed_optimizer_states_keep_their_dtypes() -> None:
    """NAdam's product is float32 for parameters of float64, and load_state_dict would cast it to theirs."""

    def run(engine: EAPipe, steps: range) -> None:
        for t in steps:
            x, y = batch(t, 0)
            engine.train_batch((x.double(), y))

    model, resumed = layers().double(), layers(seed=5).double()
    engine, other = (engine_on(net, partial(torch.optim.NAdam, lr=0.01)) for net in (model, resumed))
    run(engine, range(4))
    state = engine.state_dict()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    run(engine, range(4, 9))
    run(other, range(4, 9))
    assert_same_weights(engine, other)


@pytest.mark.parametrize("algorithm", ["ea_pipe", "pipedream", "weight_stashing", "naive"])
def test_weights_written_between_steps_count(algorithm: str) -> None:
    """Every replica restarts from them. SpecTrain is left out: it predicts from earlier steps, too."""
    model, other = layers(), layers(seed=3)
    engine, fresh = (engine_on(net, "plain sgd", algorithm=algorithm) for net in (model, other))
    fresh.train_batch(batch(50, 0))
    fresh.flush()
    engine.train_batch(batch(0, 0))
    engine.flush()
    for one in (model, other):
        one.load_state_dict(layers(seed=7).state_dict())
    train_on(engine, range(6))
    train_on(fresh, range(6))
    assert_same_weights(engine, fresh)


def test_learning_rate_is_that_of_the_mini_batch() -> None:
    """Also where its gradient comes back after the rate has changed."""
    optimizers: list[SGD] = []

    def make(parameters: Any) -> SGD:
        optimizers.append(SGD(parameters, lr=0.1))
        return optimizers[-1]

    model, reference = layers(), layers()
    engine = engine_on(model, make, virtual_stages=3, algorithm="pipedream")
    plain = SGD(reference.parameters(), lr=0.1)
    versions = [[p.detach().clone() for p in reference.parameters()]]
    for t in range(10):
        rate = 0.1 / (1 + t)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        engine.train_batch(batch(t, 0))
        stashed = layers()
        for p, value in zip(stashed.parameters(), versions[max(0, t - 2)], strict=True):
            p.data.copy_(value)
        x, y = batch(t, 0)
        gradients = torch.autograd.grad(nn.functional.cross_entropy(stashed(x), y), list(stashed.parameters()))
        for p, gradient in zip(reference.parameters(), gradients, strict=True):
            p.grad = gradient
        plain.param_groups[0]["lr"] = 0.1 if t == 0 else rate  # the first batch makes the optimizers
        plain.step()
        versions.append([p.detach().clone() for p in reference.parameters()])
    engine.flush()
    assert_equal(list(model.parameters()), list(reference.parameters()))


# --- synchronous pipelines --------------------------------------------------------------------------------------------


def train_synchronous(algorithm: str, clip_norm: float | None) -> list[Tensor]:
    model = layers()
    engine = engine_on(model, virtual_stages=None, algorithm=algorithm, split=CUTS[2], clip_norm=clip_norm)
    for t in range(8):
        x, y = batch(t, 0, size=8 if t < 5 else 4)  # shapes may change
        engine.train_batch((x[:4], y[:4]), completes=t >= 5)
        if t < 5:
            engine.train_batch((x[4:], y[4:]))
    engine.gather()
    engine.detach()
    return [p.detach() for p in model.parameters()]


@cache
def trained_synchronously() -> Outcomes:
    cases = product(("gpipe", "1f1b"), (None, 0.3))
    return launch_cases({case: partial(train_synchronous, *case) for case in cases}, 2)


@pytest.mark.parametrize("algorithm", ["gpipe", "1f1b"])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_synchronous_pipelines_are_sgd(algorithm: str, clip_norm: float | None) -> None:
    model = layers()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for t in range(8):
        x, y = batch(t, 0, size=8 if t < 5 else 4)
        optimizer.zero_grad()
        for start in range(0, len(x), 4):
            nn.functional.cross_entropy(model(x[start : start + 4]), y[start : start + 4]).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    for outcome in trained_synchronously()[algorithm, clip_norm]:
        torch.testing.assert_close(outcome, [p.detach() for p in model.parameters()])


# --- which layers a stage gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([5, 1, 1, 1], 2, [1]),
        ([1, 1, 1, 5], 2, [3]),
        ([1, 2, 3, 4, 5], 3, [3, 4]),
        ([3], 1, []),
    ],
)
def test_partition_has_the_smallest_largest_part(costs: list[float], parts: int, cuts: list[int]) -> None:
    assert chain.partition(costs, parts) == cuts


def test_balanced_cut_saves_memory_where_time_allows() -> None:
    assert chain.balanced([1, 1, 0.01, 1, 1], [1, 1, 9, 1, 1], 2) in ([2], [3])
    assert chain.balanced([1, 1, 0.01, 1, 1], [9, 1, 9, 1, 1], 2) == [2]
    assert chain.balanced([1, 1, 0.01, 1, 1], [1, 1, 9, 1, 9], 2) == [3]


def test_measuring_leaves_the_layers_as_they_were() -> None:
    model = unusual()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = [layer for _, layer in chain.flattened(model)]
    times, sizes = chain.measure(found, batch(0, 0)[0], torch.device("cpu"))
    assert len(times) == len(sizes) == len(found) == 10
    assert all(seconds > 0 for seconds in times)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


# --- bad input and faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"elastic_force": 0.0}, "elastic_force"),
        ({"elastic_force": 1.0}, "elastic_force"),
        ({"period": 0}, "period"),
        ({"replicas": 0}, "replicas"),
        ({"algorithm": "zero-bubble"}, "algorithm"),
        ({"compression": "int8"}, "compression"),
        ({"split": "evenly"}, "split"),
        ({"split": (3, 2)}, "split"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"clip_norm": 1.0, "algorithm": "naive"}, "clip_norm"),
        ({"clip_norm": 1.0, "algorithm": "weight_stashing"}, "clip_norm"),
        ({"prediction_smoothing": 1.0}, "prediction_smoothing"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_bad_settings_name_themselves(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EAPipeConfig(**settings)


def make_bad(settings: dict[str, Any]) -> tuple[str, str] | None:
    engine = engine_on(layers(), virtual_stages=None, **settings)
    outcome = raised(lambda: engine.train_batch(batch(0, 0)))
    engine.detach()
    return outcome


def test_settings_that_do_not_fit_the_model_are_refused_on_every_rank() -> None:
    cases: dict[str, dict[str, Any]] = {
        "split=(1, 2)": {"split": (1, 2)},
        "split=(40,)": {"split": (40,)},
        "micro_batches": {"algorithm": "gpipe", "micro_batches": 3},
    }
    outcomes = launch_cases({named: partial(make_bad, settings) for named, settings in cases.items()}, 2)
    for named in cases:
        for outcome in outcomes[named]:
            assert_refused({named: outcome})


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="10 stages need at least as many layers"):
        engine_on(layers(), virtual_stages=10)


def test_weights_shared_by_two_stages_are_refused() -> None:
    model = layers()
    model[6].weight = nn.Parameter(torch.zeros(8, 7))
    model.append(nn.Linear(7, 8))
    model[9].weight = model[6].weight
    engine = engine_on(model, split=(8,))
    with pytest.raises(ValueError, match="share a parameter"):
        engine.train_batch(batch(0, 0))
