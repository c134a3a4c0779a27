"""What a stage does with unusual layers, settings and states; virtual stages stand in for processes."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync import EAPipe
from lightning_pipesync.methods.ea_pipe import split as chain
from tests.support.case_table import launch_cases
from tests.support.ea_pipe_runs import (
    ASYNCHRONOUS,
    CUTS,
    OPTIMIZERS,
    assert_equal,
    assert_same_weights,
    engine_on,
    layers,
    train_on,
)
from tests.support.harness import assert_raised, launch, raised
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
UNUSUAL: dict[str, Any] = {"virtual_stages": 4, "split": (2, 5, 7)}
SETTINGS: dict[str, dict[str, Any]] = {
    **{one: {"algorithm": one} for one in ASYNCHRONOUS},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "clipped": {"clip_norm": 0.1},
    "pipedream, clipped": {"algorithm": "pipedream", "clip_norm": 0.1},
    "more replicas, clipped": {"replicas": 7, "clip_norm": 0.1},
}


def train(settings: dict[str, Any]) -> dict[str, Tensor]:
    """The whole master, and its output where the last stage is; the last batches are smaller."""
    model = unusual()
    engine = engine_on(model, **settings)
    for t in range(14):
        engine.train_batch(batch(t, 0, size=8 if t < 10 else 5))
    model.eval()
    output = engine.forward(batch(100, 0)[0])
    engine.gather()
    engine.detach()
    return {**model.state_dict(), **({} if output is None else {"output": output})}


def test_virtual_stages_are_processes_with_any_layers() -> None:
    """Dropout and BatchNorm's averages included, and all ranks have the whole master."""
    cases = {name: partial(train, {**UNUSUAL, **one, "virtual_stages": None}) for name, one in SETTINGS.items()}
    outcomes = launch_cases(cases, 4)
    for name, settings in SETTINGS.items():
        virtual = train({**UNUSUAL, **settings})
        for rank, outcome in enumerate(outcomes[name]):
            for key, value in outcome.items():
                assert torch.equal(value, virtual[key]), f"{name}: {key} on rank {rank}"
            assert ("output" in outcome) == (rank == 0)


def test_activations_are_freed() -> None:
    """Those of a mini-batch that is through, without waiting for the garbage collector."""
    engine = engine_on(layers(), virtual_stages=3)
    gc.collect()
    before = sum(isinstance(thing, chain.LayerInput) for thing in gc.get_objects())
    train_on(engine, range(8))
    engine.flush()
    assert sum(isinstance(thing, chain.LayerInput) for thing in gc.get_objects()) == before


# --- emptying, saving and loading -------------------------------------------------------------------------------------


@torch.inference_mode()
def validate_early(engine: EAPipe, t: int) -> None:
    """A framework may turn gradients off before it says that a validation begins."""
    if t < 2:
        engine.flush()
        engine.forward(batch(9, 0)[0])


def zero_gradients(engine: EAPipe, _: int) -> None:
    """Those of a mini-batch whose other parts are still to come."""
    for gradient in [p.grad for p in engine._model.parameters() if p.grad is not None]:
        gradient.zero_()


@pytest.mark.parametrize("between", [validate_early, zero_gradients])
def test_what_happens_between_the_parts_of_a_mini_batch_changes_nothing(between: Callable[[EAPipe, int], None]) -> None:
    engine, plain = engine_on(layers(), "adam"), engine_on(layers(), "adam")
    for t in range(8):
        for one in (engine, plain):
            one.train_batch(batch(t, 0), completes=t % 2 == 1)
        between(engine, t)
    assert_same_weights(engine, plain)


@pytest.mark.parametrize("name", ["ea_pipe", "weight_stashing", "spectrain", "more replicas, clipped"])
def test_resumed_run_is_the_uninterrupted_one(name: str) -> None:
    """From a file, and optimizers' states are in it; the fuzzer resumes whatever it draws."""
    engine, other = (engine_on(unusual(seed), "adam", **UNUSUAL, **SETTINGS[name]) for seed in (0, 5))
    train_on(engine, range(9))
    saved = io.BytesIO()
    torch.save({"engine": engine.state_dict(), "model": engine._model.state_dict()}, saved)
    train_on(engine, range(9, 17))
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    assert any(one["state"] for stage in checkpoint["engine"]["stages"] for one in stage["weights"]["optimizer"])
    other._model.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["engine"])
    train_on(other, range(9, 17))
    assert_same_weights(engine, other)


@pytest.mark.parametrize("settings", [*({"algorithm": name} for name in ASYNCHRONOUS), {"clip_norm": 0.1}])
def test_a_state_that_is_loaded_with_mini_batches_in_flight_replaces_them(settings: dict[str, Any]) -> None:
    """Their gradients are of other weights; one mini-batch is in parts, of which the last is still to come."""
    engine, other = engine_on(layers(), "adam", **settings), engine_on(layers(), "adam", **settings)
    train_on(engine, range(4))
    train_on(other, range(4))
    good = engine.state_dict()
    other.flush()
    train_on(engine, range(10, 14))
    engine.train_batch(batch(14, 0), completes=False)
    engine.load_state_dict(good)
    train_on(engine, range(4, 8))
    train_on(other, range(4, 8))
    assert_same_weights(engine, other)


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_a_state_from_before_the_first_mini_batch(algorithm: str) -> None:
    engine, fresh = (engine_on(layers(), "plain sgd", algorithm=algorithm) for _ in range(2))
    state = engine.state_dict()
    train_on(engine, range(5))
    engine.flush()
    engine._model.load_state_dict(layers().state_dict())
    engine.load_state_dict(state)
    for one in (engine, fresh):
        train_on(one, range(8))
    assert_same_weights(engine, fresh)


def test_a_state_of_other_settings_is_refused() -> None:
    engine = engine_on(layers())
    engine.train_batch(batch(0, 0))
    state = engine.state_dict()
    others = {"replicas=None": {"replicas": 3}, "algorithm='ea_pipe'": {"algorithm": "pipedream"}}
    for named, settings in {**others, "2 stages": {"virtual_stages": 3}}.items():
        with pytest.raises(ValueError, match=named):
            engine_on(layers(), **settings).load_state_dict(state)


def test_learning_rate_is_that_of_the_mini_batch() -> None:
    """Also where its gradient comes back after the rate has changed."""
    optimizers: list[SGD] = []

    def make(parameters: Any) -> SGD:
        optimizers.append(SGD(parameters, lr=0.1))
        return optimizers[-1]

    model, reference = layers(), layers()
    engine, plain = engine_on(model, make, virtual_stages=3, algorithm="pipedream"), SGD(reference.parameters(), lr=0.1)
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


class Counting(nn.Module):
    """Uses a buffer that it writes to, in place or by another tensor."""

    seen: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        moved = 0.9 * self.seen + 0.1 * x.detach().mean(dim=0)
        if self.in_place:
            self.seen.copy_(moved)
        else:
            self.seen = moved
        return x * (1 + self.seen)


def test_a_buffer_that_the_layers_write_to() -> None:
    """Each replica has its own, also while others are in flight; one that is replaced cannot have."""
    model, replacing, *replicas = (layers() for _ in range(4))
    for each in (model, *replicas):
        each.insert(1, Counting(in_place=True))
    engine = engine_on(model, split=(5,), elastic_force=0.1)
    pulled = torch.zeros(9)
    train_on(engine, range(2))
    engine.flush()
    for t, replica in enumerate(replicas):
        replica(batch(t, 0)[0])
        pulled = pulled + 0.1 * (replica[1].seen - pulled)
    torch.testing.assert_close(model[1].seen, pulled)
    replacing.insert(1, Counting(in_place=False))
    with pytest.raises(RuntimeError, match=r"replace their buffer 1\.seen"):
        engine_on(replacing, split=(5,)).train_batch(batch(0, 0))


# --- on processes -----------------------------------------------------------------------------------------------------


def feed_differently(algorithm: str) -> tuple[str, str] | None:
    engine = EAPipe(layers(), None, OPTIMIZERS["sgd"], algorithm=algorithm, split=CUTS[2])
    x, y = batch(0, 0)

    def loss(output: Tensor, part: Callable[[Any], Any]) -> Tensor:
        return nn.functional.cross_entropy(output, part(y))

    engine.feed(lambda: x, loss, digest=7)
    refused = raised(lambda: [engine.feed(lambda: x, loss, digest=torch.distributed.get_rank()) for _ in range(4)])
    engine.detach(timeout_s=1.0)
    return refused


def flush_earlier() -> tuple[str, str] | None:
    """The first stage flushes the pipeline where the last one expects another mini-batch."""
    engine = engine_on(layers(), virtual_stages=None, split=CUTS[2])
    train_on(engine, range(3))
    refused = raised(engine.flush if torch.distributed.get_rank() else lambda: train_on(engine, range(3, 4)))
    engine.detach(timeout_s=1.0)
    return refused


def test_different_batches_are_noticed() -> None:
    """By the last stage; the others notice that it is gone, if they do not compare the batches themselves."""
    cases: dict[str, Any] = {one: partial(feed_differently, one) for one in ("gpipe", "ea_pipe")}
    cases["flushes"] = flush_earlier
    outcomes = launch_cases(cases, 2, launch=launch)  # messages are left behind that nobody receives
    for refused in (*outcomes["gpipe"], outcomes["ea_pipe"][0]):
        assert_raised(refused, "RuntimeError", "different mini-batches")
    assert_raised(outcomes["flushes"][0], "RuntimeError", "Stage 1 has sent the end of its mini-batches")


# --- which layers a stage gets ----------------------------------------------------------------------------------------


def test_parts_are_even_and_a_balanced_cut_saves_memory_where_time_allows() -> None:
    partitions = {(1, 1, 1, 1): [2], (5, 1, 1, 1): [1], (1, 1, 1, 5): [3]}
    assert {costs: chain.partition(costs, 2) for costs in partitions} == partitions
    assert chain.partition([1, 2, 3, 4, 5], 3) == [3, 4]
    assert chain.balanced([1, 1, 0.01, 1, 1], [1, 1, 9, 1, 1], 2) in ([2], [3])
    assert chain.balanced([1, 1, 0.01, 1, 1], [9, 1, 9, 1, 1], 2) == [2]
    assert chain.balanced([1, 1, 0.01, 1, 1], [1, 1, 9, 1, 9], 2) == [3]


def test_measuring_leaves_the_layers_as_they_were() -> None:
    model = unusual()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    found = [layer for _, layer in chain.flattened(model)]
    times, sizes = chain.measure(found, batch(0, 0)[0], torch.device("cpu"))
    assert len(times) == len(sizes) == len(found) == 10
    assert all(seconds > 0 for seconds in times)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_weights_shared_by_two_stages_are_refused() -> None:
    model = layers()
    model.append(nn.Linear(7, 8))
    model[6].weight = model[9].weight = nn.Parameter(torch.zeros(8, 7))
    with pytest.raises(ValueError, match="share a parameter"):
        engine_on(model, split=(8,)).train_batch(batch(0, 0))
