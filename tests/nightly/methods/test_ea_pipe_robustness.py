"""What once went wrong in EA-Pipe, on virtual stages and on processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipesync import EAPipe
from lightning_pipesync.core.layers import LayerInput
from tests.nightly.methods.test_ea_pipe_stages import Join, Pair
from tests.support.case_table import launch_cases
from tests.support.ea_pipe_runs import ASYNCHRONOUS, CUTS, OPTIMIZERS, assert_same_weights, engine_on, layers, train_on
from tests.support.harness import on_ranks, raised
from tests.support.models import batch


def test_activations_are_freed() -> None:
    """Those of a mini-batch that is through, without waiting for the garbage collector."""
    engine = engine_on(layers(), virtual_stages=3)
    gc.collect()
    before = sum(isinstance(thing, LayerInput) for thing in gc.get_objects())
    train_on(engine, range(8))
    engine.flush()
    assert sum(isinstance(thing, LayerInput) for thing in gc.get_objects()) == before


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_saving_changes_nothing(algorithm: str, optimizer: str) -> None:
    """Against a run that only empties its pipeline; and the optimizer's state is saved."""
    saving, flushing = (engine_on(layers(), optimizer, algorithm=algorithm) for _ in range(2))
    for t in range(12):
        saving.train_batch(batch(t, 0))
        flushing.train_batch(batch(t, 0))
        if t == 5:
            saved = saving.state_dict()
            saving.optimizer_state()
            flushing.flush()
    for stage in saved["stages"]:
        assert all(state["state"] for state in stage["weights"]["optimizer"])
    assert_same_weights(saving, flushing)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_emptying_the_pipeline_without_gradients(optimizer: str) -> None:
    """As a framework does that turns them off before it says that a validation begins."""
    engine, plain = engine_on(layers(), optimizer), engine_on(layers(), optimizer)
    for t in range(6):
        engine.train_batch(batch(t, 0), completes=t != 0)
        plain.train_batch(batch(t, 0), completes=t != 0)
        if t < 2:
            with torch.inference_mode():
                engine.flush()
                engine.forward(batch(9, 0)[0])
    assert_same_weights(engine, plain)


def test_gradients_survive_being_set_to_zero() -> None:
    """Those of a mini-batch whose other parts are still to come."""
    model = layers()
    engine, plain = engine_on(model), engine_on(layers())
    for t in range(8):
        engine.train_batch(batch(t, 0), completes=t % 2 == 1)
        plain.train_batch(batch(t, 0), completes=t % 2 == 1)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
    assert_same_weights(engine, plain)


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
    model = layers()
    model.insert(1, Counting(in_place=True))
    engine = engine_on(model, split=(5,), elastic_force=0.1)
    replicas = [layers(), layers()]
    for replica in replicas:
        replica.insert(1, Counting(in_place=True))
    for t in range(2):
        engine.train_batch(batch(t, 0))
        replicas[t](batch(t, 0)[0])
    engine.flush()
    pulled = torch.zeros(9)
    for replica in replicas:
        pulled = pulled + 0.1 * (replica[1].seen - pulled)
    torch.testing.assert_close(model[1].seen, pulled)
    replacing = layers()
    replacing.insert(1, Counting(in_place=False))
    with pytest.raises(RuntimeError, match=r"replace their buffer 1\.seen"):
        engine_on(replacing, split=(5,)).train_batch(batch(0, 0))


def test_a_state_of_other_settings_is_refused() -> None:
    engine = engine_on(layers())
    engine.train_batch(batch(0, 0))
    state = engine.state_dict()
    for settings, named in (({"replicas": 3}, "replicas=None"), ({"algorithm": "pipedream"}, "algorithm='ea_pipe'")):
        with pytest.raises(ValueError, match=named):
            engine_on(layers(), **settings).load_state_dict(state)
    with pytest.raises(ValueError, match="2 stages"):
        engine_on(layers(), virtual_stages=3).load_state_dict(state)


def test_a_state_from_before_the_first_batch_restarts_training() -> None:
    """As a search for the learning rate does."""
    model = layers()
    engine = engine_on(model)
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, engine.state_dict()
    train_on(engine, range(5))
    engine.flush()
    model.load_state_dict(weights)
    for stage in engine._stages:
        stage._optimizer.state.clear()
    engine.load_state_dict(state)
    fresh = engine_on(layers())
    train_on(engine, range(5))
    train_on(fresh, range(5))
    assert_same_weights(engine, fresh)


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


class Ends(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] * parts[1]


class Splits(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.sigmoid()


def train_pairs(algorithm: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Splits(), Ends(), nn.Linear(8, 3))
    engine = EAPipe(model, nn.functional.cross_entropy, OPTIMIZERS["sgd"], algorithm=algorithm, split=(3,))
    train_on(engine, range(4))
    engine.gather()
    engine.detach()
    return [tensor.detach() for tensor in model.state_dict().values()]


def test_a_tuple_between_synchronous_stages() -> None:
    """And BatchNorm has seen each micro-batch once, not what shapes are looked at with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Splits(), Ends(), nn.Linear(8, 3))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for t in range(4):
        x, y = batch(t, 0)
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (nn.functional.cross_entropy(model(x[part]), y[part]) / 2).backward()
        optimizer.step()
    algorithms = ("gpipe", "1f1b")
    outcomes = launch_cases({algorithm: partial(train_pairs, algorithm) for algorithm in algorithms}, 2)
    for outcome in (outcome for algorithm in algorithms for outcome in outcomes[algorithm]):
        torch.testing.assert_close(outcome, [tensor.detach() for tensor in model.state_dict().values()])


def test_dictionaries_and_tuples_pass_between_stages() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Pair(), Join(), nn.Linear(8, 3))
    engine = engine_on(model, split=(2,))
    assert engine.train_batch(batch(0, 0)) is not None


def feed_differently(algorithm: str) -> tuple[str, str] | None:
    engine = EAPipe(layers(), None, OPTIMIZERS["sgd"], algorithm=algorithm, split=CUTS[2])
    x, y = batch(0, 0)

    def loss(output: Tensor, part: Callable[[Any], Any]) -> Tensor:
        return nn.functional.cross_entropy(output, part(y))

    engine.feed(lambda: x, loss, digest=7)
    return raised(lambda: [engine.feed(lambda: x, loss, digest=torch.distributed.get_rank()) for _ in range(4)])


@pytest.mark.parametrize("algorithm", ["ea_pipe", "gpipe"])
def test_different_batches_are_noticed(algorithm: str) -> None:
    """By the last stage; the others notice that it is gone, if they do not compare the batches themselves."""
    outcomes = on_ranks(feed_differently, 2, algorithm)
    assert outcomes[0] is not None
    assert outcomes[0][0] == "RuntimeError"
    assert "different mini-batches" in outcomes[0][1]
    if algorithm == "gpipe":
        assert outcomes[1] == outcomes[0]
