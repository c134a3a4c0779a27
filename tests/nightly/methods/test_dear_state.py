"""DeAR and what is saved, loaded or written beside it, what it keeps in memory, and optimizers that it cannot copy."""

from __future__ import annotations

import math
import time
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync.methods.dear import DeAR
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.method_runs import SMALL, Backwards, backwards
from tests.support.models import Run, assert_same, loss, seeded_mlp, state

States = tuple[dict[str, Tensor], dict[str, Tensor]]


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    return SGD(model.parameters(), lr=lr)


def assert_pairs(outcomes: list[States], what: object = "") -> None:
    """Asserts that each rank's two states are the same, and all ranks' are."""
    for expected, actual in outcomes:
        assert_same(actual, expected, what)
        assert_same(actual, outcomes[0][1], what)


def thawed_since_the_checkpoint(thaws: bool, settings: dict[str, Any]) -> States:
    """The first layer is trained only after a checkpoint (``thaws``), or only before it, as if by another job.

    Returns the weights of a run that is not saved, and of one that is.
    """

    def train(resumes: bool) -> dict[str, Tensor]:
        def begin(seed: int) -> tuple[nn.Module, Optimizer, DeAR]:
            model = seeded_mlp(seed)
            optimizer = SGD(model[2].parameters(), lr=0.05, momentum=0.9)
            if not thaws:
                train_first(optimizer, model)
            return model, optimizer, DeAR(model, optimizer, **{**SMALL, **settings})

        def train_first(optimizer: Optimizer, model: nn.Module) -> None:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})

        def steps(numbers: range) -> None:
            for number in numbers:
                optimizer.zero_grad()
                loss(model, number, dist.get_rank()).backward()
                sync.step()

        model, optimizer, sync = begin(0)
        steps(range(4))
        sync.flush()
        if resumes:
            saved = deepcopy((model.state_dict(), sync.optimizer_state_dict(), sync.state_dict()))
            sync.detach()
            model, optimizer, sync = begin(1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if thaws:
            train_first(optimizer, model)
        else:
            removed = optimizer.param_groups.pop()["params"]
            for parameter in removed if resumes else ():  # what was loaded is here; otherwise DeAR's buckets have it
                optimizer.state.pop(parameter, None)
        if resumes:
            sync.load_state_dict(saved[2])
        steps(range(4, 8))
        sync.flush()
        sync.detach()
        return state(model)

    return train(False), train(True)


def flushed_after_a_backward_pass(settings: dict[str, Any]) -> States:
    """Rank 0 has started all reduce-scatters of a step when all are to wait; rank 1 has no gradient for the first.

    Returns the weights without and with a flush.
    """

    def train(flushes: bool) -> dict[str, Tensor]:
        run = Run(DeAR, sgd, backwards(), **{**SMALL, "timeout_s": 60, **settings})
        run.steps(range(3))
        for number in range(3, 6):
            run.optimizer.zero_grad()
            used = run.model.head.bias.square() if dist.get_rank() else loss(run.model, number, 0)
            used.sum().backward()
            if flushes:
                run.sync.flush()
                run.sync.resume()
            run.sync.step()
        return run.end()

    return train(False), train(True)


def loaded_under_a_gather(update: str) -> States:
    """Loads weights while those of the last step are being gathered, slowly."""
    run, expected = Run(DeAR, sgd, **SMALL, update=update), state(seeded_mlp(seed=7))
    run.steps(range(3))  # until the order of the modules is known
    gather = run.sync.transport.all_gather

    def gather_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return gather(*args, **kwargs)

    run.sync.transport.all_gather = gather_slowly
    run.step(3)
    run.model.load_state_dict(expected)
    return expected, run.end()


UPDATES = ("sharded", "replicated")
#: By what is done: two states that are the same, on all ranks.
PAIRS: dict[str, partial[States]] = {
    **{
        f"{'thaws' if thaws else 'freezes'} {settings}": partial(thawed_since_the_checkpoint, thaws, settings)
        for thaws, settings in product((True, False), ({}, {"update": "replicated"}, {"low_rank": 1}))
    },
    **{
        f"flushes {settings}": partial(flushed_after_a_backward_pass, settings)
        for settings in ({}, {"update": "replicated", "bucket_mb": 1}, {"low_rank": 1})
    },
    **{f"loads under a gather, {update}": partial(loaded_under_a_gather, update) for update in UPDATES},
}


def written_from_outside(settings: dict[str, Any]) -> bool:
    """Weights that the user writes, in place or by other memory, are those that training goes on from."""
    run = Run(DeAR, partial(sgd, lr=1e-6), Backwards(), **{**SMALL, **settings})
    model, sync = run.model, run.sync
    run.steps(range(3))
    sync.synchronize()
    kept = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    run.step(3)
    sync.flush()
    kept.append(all(bool((parameter - 0.5).abs().max() < 1e-3) for parameter in model.parameters()))
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 0.25)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1
    run.step(4)
    sync.flush()
    kept.append(not torch.equal(model.head.bias, torch.full_like(model.head.bias, 0.25)))
    kept.append(all(bool((parameter - 0.25).abs().max() < 0.2) for parameter in model.parameters()))
    sync.detach()
    return all(kept)


def diverge_and_recover(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Loads finite weights after a loss that was not finite, and continues."""
    run = Run(DeAR, sgd, backwards(), **{**SMALL, **settings})
    run.steps(range(3))  # until there are buckets
    (loss(run.model, 3, dist.get_rank()) * math.inf).backward()
    run.sync.step()
    run.sync.flush()
    assert not all(value.isfinite().all() for value in state(run.model).values())
    run.model.load_state_dict(backwards().state_dict())
    run.steps(range(4, 8))
    return run.end()


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
    counting = Run(DeAR, lambda model: Counting(model.parameters(), lr=0.1), model)
    outcomes = [raised(lambda: DeAR(model, wrapping)), raised(lambda: counting.steps(range(2)))]
    counting.sync.detach()
    return outcomes


CODECS = ("bf16", "fp8", "int8", "int4", "topk", "chunked_topk")
#: Neither in a residual nor in the gaps between parameters, of which the next scales would not be finite.
DIVERGED = [
    {"update": update, "compression": codec, "error_feedback": feedback}
    for update, codec, feedback in product(UPDATES, CODECS, (True, False))
] + [{"low_rank": 2, "low_rank_method": kind} for kind in ("acp_sgd", "power_sgd")]
WRITTEN = [{}, {"compression": "bf16"}, {"update": "replicated"}]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {**PAIRS, "odd optimizers": with_odd_optimizers}
    cases |= {("diverged", i): partial(diverge_and_recover, settings) for i, settings in enumerate(DIVERGED)}
    cases |= {("written", i): partial(written_from_outside, settings) for i, settings in enumerate(WRITTEN)}
    return launch_cases(cases, 2)


@pytest.mark.parametrize("what", PAIRS)
def test_states_and_loads_count(what: str, outcomes: Outcomes) -> None:
    assert_pairs(outcomes[what], what)


def test_weights_may_be_written_from_outside(outcomes: Outcomes) -> None:
    for i in range(len(WRITTEN)):
        assert outcomes["written", i] == [True, True], WRITTEN[i]


def test_nothing_remains_of_values_that_were_not_finite(outcomes: Outcomes) -> None:
    for i, settings in enumerate(DIVERGED):
        for weights in outcomes["diverged", i]:
            assert all(value.isfinite().all() for value in weights.values()), settings


def test_optimizers_that_cannot_be_copied_are_refused(outcomes: Outcomes) -> None:
    for wrapping, counting in outcomes["odd optimizers"]:
        assert_raised(wrapping, "ValueError", "Wrapping wraps another optimizer")
        assert_raised(counting, "RuntimeError", "'k'")


def bytes_of_state(with_dear: bool) -> int:
    """What AdamW keeps on this rank, in bytes, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = AdamW(model.parameters())
    sync = DeAR(model, optimizer, update="sharded", fusion="layers", num_layers=2) if with_dear else None
    model(torch.ones(1, 64)).sum().backward()
    (sync or optimizer).step()
    if sync is None:
        kept = list(optimizer.state.values())
    else:
        sync.synchronize()
        kept = [state for bucket in sync._fused.buckets for state in bucket.update.states().values()]
        sync.detach()
    return sum(value.nbytes for state in kept for value in state.values() if value.dim())


def test_optimizer_state_is_divided_by_the_number_of_ranks() -> None:
    outcomes = launch_cases({one: partial(bytes_of_state, one) for one in (False, True)}, 4)
    for whole, own in zip(outcomes[False], outcomes[True], strict=True):
        assert own == pytest.approx(whole / 4, rel=0.01)
