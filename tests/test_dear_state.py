"""DeAR and what is saved, loaded or written beside it; and optimizers that it cannot work with."""

from __future__ import annotations

import io
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync.methods.dear import DeAR
from tests.harness import launch, raised
from tests.models import seeded_mlp, state
from tests.test_dear_models import SMALL, STEPS, Backwards, check, one_step


def stopped_and_resumed(settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains 2 * STEPS steps at once, and with a new DeAR in the middle."""

    def run(sync: DeAR, model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            one_step(model, optimizer, sync, step)
        sync.flush()

    def begin() -> tuple[nn.Module, Optimizer, DeAR]:
        torch.manual_seed(0)
        model = Backwards()
        optimizer = AdamW(model.parameters(), lr=0.01)
        return model, optimizer, DeAR(model, optimizer, **{**SMALL, **settings})

    model, optimizer, sync = begin()
    run(sync, model, optimizer, range(2 * STEPS))
    expected = state(model)
    sync.detach()
    model, optimizer, sync = begin()
    run(sync, model, optimizer, range(STEPS))
    weights, saved, kept = state(model), sync.state_dict(), sync.optimizer_state_dict()
    sync.detach()
    model, optimizer, sync = begin()
    model.load_state_dict(weights)
    optimizer.load_state_dict(kept)
    sync.load_state_dict(saved)
    run(sync, model, optimizer, range(STEPS, 2 * STEPS))
    sync.detach()
    return expected, state(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"update": "replicated", "compression": "int8"},
        {"compression": "int8", "error_feedback": False},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(settings: dict[str, Any]) -> None:
    check(launch(stopped_and_resumed, 2, settings))


def written_from_outside(settings: dict[str, Any]) -> bool:
    """Weights that the user writes, in place or by other memory, are those that training goes on from."""
    model = Backwards()
    optimizer = SGD(model.parameters(), lr=1e-6)
    sync = DeAR(model, optimizer, **{**SMALL, **settings})
    for step in range(3):
        one_step(model, optimizer, sync, step)
    sync.synchronize()
    kept = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    one_step(model, optimizer, sync, 3)
    sync.flush()
    kept.append(all(bool((parameter - 0.5).abs().max() < 1e-3) for parameter in model.parameters()))
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 0.25)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    one_step(model, optimizer, sync, 4)
    sync.flush()
    kept.append(not torch.equal(model.head.bias, torch.full_like(model.head.bias, 0.25)))
    kept.append(all(bool((parameter - 0.25).abs().max() < 0.2) for parameter in model.parameters()))
    sync.detach()
    return all(kept)


@pytest.mark.parametrize("settings", [{}, {"compression": "bf16"}, {"update": "replicated"}], ids=str)
def test_weights_may_be_written_from_outside(settings: dict[str, Any]) -> None:
    assert launch(written_from_outside, 2, settings) == [True, True]


def loaded_in_between() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Goes back to an earlier state of weights and optimizer, twice."""
    torch.manual_seed(0)
    model = Backwards()
    optimizer = AdamW(model.parameters(), lr=0.01)
    sync = DeAR(model, optimizer, **SMALL)
    ends = []
    for step in range(2):
        one_step(model, optimizer, sync, step)
    sync.flush()
    weights, kept = state(model), sync.optimizer_state_dict()
    for _ in range(2):
        for step in range(2, 5):
            one_step(model, optimizer, sync, step)
        sync.flush()
        ends.append(state(model))
        model.load_state_dict(weights)
        optimizer.load_state_dict(kept)
    copied = deepcopy(model)
    assert copied(torch.ones(1, 6)).shape == (1, 3)
    torch.save(model, io.BytesIO())
    sync.detach()
    return ends[0], ends[1]


def test_states_may_be_loaded_in_between() -> None:
    check(launch(loaded_in_between, 2))


class Wrapping(SGD):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.optimizer = inner


class Counting(SGD):
    """Keeps state in its parameter groups."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def with_odd_optimizers() -> list[tuple[str, str] | None]:
    model = Backwards()
    wrapping = Wrapping(SGD(model.parameters(), lr=0.1))
    counting = Counting(model.parameters(), lr=0.1)
    sync = DeAR(model, counting)

    def two_steps() -> None:
        one_step(model, counting, sync, 0)
        one_step(model, counting, sync, 1)

    outcomes = [raised(lambda: DeAR(model, wrapping)), raised(two_steps)]
    sync.detach()
    return outcomes


def test_optimizers_that_cannot_be_copied_are_refused() -> None:
    for wrapping, counting in launch(with_odd_optimizers, 2):
        assert wrapping is not None
        assert wrapping[0] == "ValueError"
        assert "Wrapping wraps another optimizer" in wrapping[1]
        assert counting is not None
        assert counting[0] == "RuntimeError"
        assert "'k'" in counting[1]


def bytes_of_state(with_dear: bool) -> int:
    """What AdamW keeps on this rank, in bytes, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = AdamW(model.parameters())
    sync = DeAR(model, optimizer, update="sharded", fusion="layers", num_layers=2) if with_dear else None
    model(torch.ones(1, 64)).sum().backward()
    (sync or optimizer).step()
    kept = list(optimizer.state.values())
    if sync is not None:
        sync.synchronize()
        kept += [state for bucket in sync._fused.buckets for state in bucket.update.states().values()]
        sync.detach()
    return sum(value.nbytes for state in kept for value in state.values() if value.dim())


def test_optimizer_state_is_divided_by_the_number_of_ranks() -> None:
    [whole, *_] = launch(bytes_of_state, 4, False)
    for own in launch(bytes_of_state, 4, True):
        assert own == pytest.approx(whole / 4, rel=0.01)


def load_at_once(update: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads weights while those of the last step are being gathered, slowly."""
    model, expected = seeded_mlp(), state(seeded_mlp(seed=7))
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = DeAR(model, optimizer, **SMALL, update=update)
    for step in range(3):  # until the order of the modules is known
        one_step(model, optimizer, sync, step)
    gather = sync.transport.all_gather

    def gather_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return gather(*args, **kwargs)

    sync.transport.all_gather = gather_slowly  # type: ignore[method-assign]
    one_step(model, optimizer, sync, 3)
    model.load_state_dict(expected)
    sync.flush()
    sync.detach()
    return expected, state(model)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_loaded_weights_are_not_overwritten(update: str) -> None:
    check(launch(load_at_once, 2, update))
