"""DeAR and what is saved, loaded or written beside it; and optimizers that it cannot work with."""

from __future__ import annotations

import io
import math
import time
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync.methods.dear import DeAR
from tests.nightly.methods.test_dear_models import SMALL, STEPS, Backwards
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, assert_same, loss, seeded_mlp, state


def backwards() -> nn.Module:
    torch.manual_seed(0)
    return Backwards()


def assert_pairs(outcomes: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    """Asserts that each rank's two states are the same, and all ranks' are."""
    for expected, actual in outcomes:
        assert_same(actual, expected)
        assert_same(actual, outcomes[0][1])


def stopped_and_resumed(settings: dict[str, Any], former: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains 2 * STEPS steps at once, and with a new DeAR in the middle."""

    def begin() -> Run:
        return Run(DeAR, "adamw", backwards(), **{**SMALL, **settings})

    whole = begin()
    whole.steps(range(2 * STEPS))
    expected = whole.end()
    first = begin()
    first.steps(range(STEPS))
    first.sync.flush()
    weights, saved, kept = state(first.model), first.sync.state_dict(), first.sync.optimizer_state_dict()
    for bucket in saved["buckets"] if former else ():
        bucket["feedback"]["shard"] = torch.zeros(1)
    first.sync.detach()
    second = begin()
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(kept)
    second.sync.load_state_dict(saved)
    second.steps(range(STEPS, 2 * STEPS))
    return expected, second.end()


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {}),
        (2, {"update": "replicated", "compression": "int8"}),
        (2, {"compression": "int8"}),
        (2, {"compression": "int8", "error_feedback": False}),
        (4, {"update": "replicated", "compression": "int8", "topology": "torus2d"}),
        (4, {"update": "sharded", "compression": "int8", "topology": "torus2d"}),
        (3, {"compression": "int8", "topology": "tree"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(world_size: int, settings: dict[str, Any]) -> None:
    assert_pairs(on_ranks(stopped_and_resumed, world_size, settings))


def test_a_former_state_with_an_unused_residual_resumes() -> None:
    assert_pairs(on_ranks(stopped_and_resumed, 2, {"compression": "int8"}, True))


def thawed_since_the_checkpoint(resumes: bool, thaws: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The first layer is trained only after a checkpoint (``thaws``), or only before it, as if by another job."""

    def begin(seed: int) -> tuple[nn.Module, Optimizer, DeAR]:
        model = seeded_mlp(seed)
        optimizer = SGD(model[2].parameters(), lr=0.05, momentum=0.9)
        if not thaws:
            train_first(optimizer, model)
        return model, optimizer, DeAR(model, optimizer, **{**SMALL, **settings})

    def train_first(optimizer: Optimizer, model: nn.Module) -> None:
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})

    def stop_training_first(optimizer: Optimizer) -> None:
        for parameter in optimizer.param_groups.pop()["params"]:
            optimizer.state.pop(parameter, None)

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
        stop_training_first(optimizer)
    if resumes:
        sync.load_state_dict(saved[2])
    steps(range(4, 8))
    sync.flush()
    sync.detach()
    return state(model)


@pytest.mark.parametrize("settings", [{}, {"update": "replicated"}, {"low_rank": 1}], ids=str)
@pytest.mark.parametrize("thaws", [True, False], ids=["thaws", "freezes"])
def test_a_checkpoint_of_other_parameters_resumes(thaws: bool, settings: dict[str, Any]) -> None:
    """Those that the optimizer has now are trained, in new buckets, as if they had been added in the same run."""
    expected = on_ranks(thawed_since_the_checkpoint, 2, False, thaws, settings)[0]
    for weights in on_ranks(thawed_since_the_checkpoint, 2, True, thaws, settings):
        assert_same(weights, expected)


def flushed_after_a_backward_pass(flushes: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Rank 0 has started all reduce-scatters of a step when all are to wait; rank 1 has no gradient for the first."""
    run = Run(DeAR, sgd, backwards(), **{**SMALL, "timeout_s": 10, **settings})
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


@pytest.mark.parametrize("settings", [{}, {"update": "replicated", "bucket_mb": 1}, {"low_rank": 1}], ids=str)
def test_ranks_that_have_begun_different_buckets_do_not_wait_for_each_other(settings: dict[str, Any]) -> None:
    expected = on_ranks(flushed_after_a_backward_pass, 2, False, settings)[0]
    for weights in on_ranks(flushed_after_a_backward_pass, 2, True, settings):
        assert_same(weights, expected)


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


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    return SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("settings", [{}, {"compression": "bf16"}, {"update": "replicated"}], ids=str)
def test_weights_may_be_written_from_outside(settings: dict[str, Any]) -> None:
    assert on_ranks(written_from_outside, 2, settings) == [True, True]


def loaded_in_between() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Goes back to an earlier state of weights and optimizer, twice."""
    run = Run(DeAR, "adamw", backwards(), **SMALL)
    ends = []
    run.steps(range(2))
    run.sync.flush()
    weights, kept = state(run.model), run.sync.optimizer_state_dict()
    for _ in range(2):
        run.steps(range(2, 5))
        run.sync.flush()
        ends.append(state(run.model))
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(kept)
    copied = deepcopy(run.model)
    assert copied(torch.ones(1, 6)).shape == (1, 3)
    torch.save(run.model, io.BytesIO())
    run.sync.detach()
    return ends[0], ends[1]


def test_states_may_be_loaded_in_between() -> None:
    assert_pairs(on_ranks(loaded_in_between, 2))


def loaded_while_given_back() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads a state before the first step, when there are no buckets yet, as FSDP2's functions do."""
    first, second = Run(DeAR, "adamw", backwards(), **SMALL), Run(DeAR, "adamw", backwards(), **SMALL)
    first.steps(range(2))
    first.sync.flush()
    weights, kept = state(first.model), first.sync.optimizer_state_dict()
    second.model.load_state_dict(weights)
    with second.sync.given_back():
        second.optimizer.load_state_dict(kept)
    first.steps(range(2, 5))
    second.steps(range(2, 5))
    return first.end(), second.end()


def test_a_state_may_be_loaded_while_the_optimizer_is_given_back() -> None:
    assert_pairs(on_ranks(loaded_while_given_back, 2))


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


def test_optimizers_that_cannot_be_copied_are_refused() -> None:
    for wrapping, counting in on_ranks(with_odd_optimizers, 2):
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
    kept = list(optimizer.state.values())
    if sync is not None:
        sync.synchronize()
        kept += [state for bucket in sync._fused.buckets for state in bucket.update.states().values()]
        sync.detach()
    return sum(value.nbytes for state in kept for value in state.values() if value.dim())


def test_optimizer_state_is_divided_by_the_number_of_ranks() -> None:
    [whole, *_] = on_ranks(bytes_of_state, 4, False)
    for own in on_ranks(bytes_of_state, 4, True):
        assert own == pytest.approx(whole / 4, rel=0.01)


def copies_of_the_model(settings: dict[str, Any]) -> float:
    """What buckets with a lossy codec allocate beside weights and gradients on this rank, in sizes of the model."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    sync = DeAR(model, SGD(model.parameters(), lr=0.1), compression="int8", fusion="layers", num_layers=2, **settings)
    model(torch.ones(1, 64)).sum().backward()
    sync.step()
    sync.synchronize()
    holders = [
        holder for bucket in sync._fused.buckets for holder in (bucket.values, bucket, *bucket.feedback) if holder
    ]
    tensors = [value for holder in holders for value in vars(holder).values() if isinstance(value, Tensor)]
    allocated = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    saved = [bucket["feedback"] for bucket in sync.state_dict()["buckets"] if "feedback" in bucket]
    assert all(("shard" in residuals) == (settings["update"] == "replicated") for residuals in saved)
    sync.detach()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return sum(allocated.values()) / size - 2


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"update": "sharded"}, 1 + 1 / 4 + 1 + 1 / 4),  # difference, updated shard; residuals of gradient and shard
        ({"update": "sharded", "error_feedback": False}, 1 + 1 / 4),
        ({"update": "replicated"}, 1 + 1 / 4),  # residuals of gradient and shard
        ({"update": "replicated", "error_feedback": False}, 0),
    ],
    ids=str,
)
def test_memory_of_a_lossy_codec(settings: dict[str, Any], copies: float) -> None:
    """As docs/dear.md has it."""
    assert on_ranks(copies_of_the_model, 4, settings) == [copies] * 4


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


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "int4", "topk", "chunked_topk"])
@pytest.mark.parametrize("feedback", [True, False])
def test_nothing_remains_of_values_that_were_not_finite(update: str, codec: str, feedback: bool) -> None:
    """Neither in a residual nor in the gaps between parameters, of which the next scales would not be finite."""
    settings = {"update": update, "compression": codec, "error_feedback": feedback}
    for weights in on_ranks(diverge_and_recover, 2, settings):
        assert all(value.isfinite().all() for value in weights.values())


def load_at_once(update: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_loaded_weights_are_not_overwritten(update: str) -> None:
    assert_pairs(on_ranks(load_at_once, 2, update))
