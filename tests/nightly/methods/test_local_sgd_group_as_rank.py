"""A group of ranks trains as one rank does: on its averaged gradient, and in what it tells the other groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import LocalSGD
from tests.support.harness import on_ranks
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS, GROUPS, SIZE = 13, 2, 2


# --- as half as many ranks --------------------------------------------------------------------------------------------


def wide_network() -> nn.Module:
    """Two layers of 64 * 64 weights: each rank's shard, of 4 and of 2 ranks, is whole chunks of int8 and of int4."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))


def wide_loss(model: nn.Module, step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(8, 64, generator=generator) * (1 + (step * 7 + replica * 3) % 5)
    return (model(x) - x.roll(1, dims=1)).square().mean()


def train(settings: dict[str, Any], group_size: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], float]:
    """Returns the weights after each step, the consolidated ones, and the number of rounds."""
    run = Run(LocalSGD, "adamw", wide_network(), ranks_per_replica=group_size, bucket_mb=1e-4, **settings)
    weights = []
    for i in range(STEPS):
        run.optimizer.zero_grad()
        wide_loss(run.model, i, dist.get_rank() // group_size).backward()
        run.sync.step()
        weights.append(state(run.model))
    rounds = run.sync.metrics()["rounds"]
    return weights, run.end(), rounds


@pytest.mark.parametrize(
    "settings",
    [
        {"period": 3, "compression": "int8", "outer_optimizer": "nesterov"},
        {"period": 3, "compression": "int8", "error_feedback": False},
        {"period": 4, "compression": "int4", "fragments": 2, "overlap_steps": 2, "mixing_factor": 0.5},
        {"period": 2, "participation": 0.5},
        {"period": "selsync", "delta": 0.2, "smoothing": 0.5},
        {"period": 3, "lr_scale": "auto"},
        {"period": 1, "neighbors": "ring", "overlap_steps": 1},
    ],
    ids=str,
)
def test_groups_on_the_same_batches_are_half_as_many_ranks(settings: dict[str, Any]) -> None:
    """Bit for bit: the mean of equal gradients is that gradient, and the columns send what the ranks do."""
    alone = on_ranks(train, GROUPS, settings, 1)
    for rank, (weights, consolidated, rounds) in enumerate(on_ranks(train, GROUPS * SIZE, settings, SIZE)):
        expected, expected_consolidated, expected_rounds = alone[rank // SIZE]
        assert 0 < rounds == expected_rounds
        for i, (own, of_rank) in enumerate(zip(weights, expected, strict=True)):
            assert_same(own, of_rank, f"rank {rank}, step {i}")
        assert_same(consolidated, expected_consolidated, rank)


# --- its gradient -----------------------------------------------------------------------------------------------------


def clip_accumulated() -> tuple[list[Tensor], float, list[Tensor]]:
    """Returns this rank's gradient of two batches, the norm by which it is clipped, and the clipped gradient."""
    run = Run(LocalSGD, period=4, ranks_per_replica=SIZE)
    model, sync = run.model, run.sync
    with sync.no_sync():
        loss(model, 0, dist.get_rank()).backward()
    loss(model, 1, dist.get_rank()).backward()
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = float(sync.clip(0.1))
    clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sync.step()
    sync.detach()
    return own, norm, clipped


def test_the_averaged_gradient_of_the_group_is_clipped() -> None:
    outcomes = on_ranks(clip_accumulated, GROUPS * SIZE)
    for group in range(GROUPS):
        members = outcomes[group * SIZE : (group + 1) * SIZE]
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in members[0][0]]
        for parameter, first, second in zip(parameters, members[0][0], members[1][0], strict=True):
            assert not torch.equal(first, second)
            parameter.grad = (first + second) / 2
        norm = float(nn.utils.clip_grad_norm_(parameters, 0.1))
        assert norm > 0.1, "there is something to clip"
        for _, of_rank, clipped in members:
            assert of_rank == norm
            assert all(torch.equal(p.grad, value) for p, value in zip(parameters, clipped, strict=True))  # type: ignore[arg-type]


def overflow_on_rank_1() -> tuple[list[bool], dict[str, Tensor]]:
    """Returns whether the loss scaler has let the optimizer take each step, and the weights after an average."""
    run = Run(LocalSGD, period=3, ranks_per_replica=SIZE)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stepped = []
    for i in range(3):
        before = scaler.get_scale()
        run.optimizer.zero_grad()
        scaler.scale(loss(run.model, i, dist.get_rank())).backward()
        if i == 0 and dist.get_rank() == 1:
            next(run.model.parameters()).grad[0] = torch.inf  # type: ignore[index]
        run.sync.reduce(scaler=scaler)
        run.sync.step(lambda: scaler.step(run.optimizer))
        scaler.update()
        stepped.append(scaler.get_scale() == before)
    weights = state(run.model)
    run.sync.detach()
    return stepped, weights


def test_an_overflow_skips_the_step_of_the_whole_group() -> None:
    """It is a step nevertheless: the groups meet for their average."""
    outcomes = on_ranks(overflow_on_rank_1, GROUPS * SIZE)
    for rank, (stepped, weights) in enumerate(outcomes):
        assert stepped == [rank // SIZE != 0, True, True]
        assert all(value.isfinite().all() for value in weights.values())
        assert_same(weights, outcomes[0][1], rank)


def rounds_with_a_jump(jump: list[float]) -> float:
    """Returns the number of rounds if this rank's gradient, which is 1, changes by its jump in the last step."""
    model = nn.Linear(1, 1, bias=False)
    settings: dict[str, Any] = {"period": "selsync", "delta": 1.0, "window": 2, "smoothing": 0.5}
    run = Run(LocalSGD, "sgd", model, ranks_per_replica=SIZE, **settings)
    for i in range(8):
        run.optimizer.zero_grad()
        (model.weight.sum() * (1 + jump[dist.get_rank()] * (i == 7))).backward()
        run.sync.step()
    rounds = run.sync.metrics()["rounds"]
    run.sync.detach()
    return rounds


def test_selsync_measures_the_averaged_gradient_of_the_group() -> None:
    """Jumps that cancel each other in their group trigger nothing."""
    jumps = [[0.0, 0.0, 0.0, 0.0], [100.0, -100.0, 0.0, 0.0], [100.0, 100.0, 0.0, 0.0]]
    for none, cancelled, shared in zip(
        *(on_ranks(rounds_with_a_jump, GROUPS * SIZE, one) for one in jumps), strict=True
    ):
        assert cancelled == none
        assert shared == none + 1


# --- without groups ---------------------------------------------------------------------------------------------------


def number_of_process_groups(group_sizes: list[int | None]) -> list[int]:
    """Returns how many process groups the method makes with each size; None: the setting is not given."""
    numbers, new_group = [], dist.new_group
    for size in group_sizes:
        made: list[Any] = []

        def counted(*args: Any, made: list[Any] = made, **kwargs: Any) -> Any:
            made.append(new_group(*args, **kwargs))
            return made[-1]

        model = seeded_mlp()
        settings = {} if size is None else {"ranks_per_replica": size}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", counted)
            sync = LocalSGD(model, OPTIMIZERS["sgd"](model), **settings)  # type: ignore[arg-type]
        numbers.append(len(made))
        sync.detach()
    return numbers


def test_without_groups_there_is_no_further_process_group() -> None:
    for default, of_one, of_two in on_ranks(number_of_process_groups, GROUPS * SIZE, [None, 1, SIZE]):
        assert default == of_one == 1
        assert of_two == 1 + GROUPS + SIZE, "a row for each group, and a column for each place in it"


class SlowFirstLayer(torch.autograd.Function):
    """Between two layers; its backward pass goes on when some of a gradient is sent, or after a time without."""

    sent: Callable[[], float]
    seen: list[bool]

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        end = time.monotonic() + WAIT_S
        while not (sent := SlowFirstLayer.sent() > LEAST) and time.monotonic() < end:
            time.sleep(0.01)
        SlowFirstLayer.seen.append(sent)
        return gradient


WAIT_S = 60.0
LEAST = 100 / 2**20  # MiB, more than flags have


def train_slowly(settings: dict[str, Any]) -> list[bool]:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    run = Run(LocalSGD, "sgd", nn.Sequential(first, last), bucket_mb=1e-4, period=100, **settings)
    sent: list[bool] = []
    for _ in range(2):
        before = run.sync.metrics()["mib_sent"]
        SlowFirstLayer.sent = lambda before=before: run.sync.metrics()["mib_sent"] - before  # type: ignore[misc]
        SlowFirstLayer.seen = sent
        run.optimizer.zero_grad()
        last(SlowFirstLayer.apply(first(torch.ones(2, 8)))).sum().backward()  # type: ignore[no-untyped-call]
        run.sync.step()
    run.sync.detach()
    return sent


@pytest.mark.parametrize("settings", [{"ranks_per_replica": SIZE}, {"warmup_steps": 2}])
def test_gradients_are_averaged_under_the_backward_pass(settings: dict[str, Any]) -> None:
    assert on_ranks(train_slowly, GROUPS * SIZE, settings) == [[True, True]] * (GROUPS * SIZE)


def train_with(act: str) -> dict[str, Tensor]:
    """Takes 4 steps; between the backward pass and the third one something else happens, on all ranks."""
    run = Run(LocalSGD, bucket_mb=1e-4, period=2, ranks_per_replica=SIZE, outer_optimizer="nesterov")
    rank, sync = dist.get_rank(), run.sync
    run.steps(range(2))
    run.optimizer.zero_grad()
    if act == "a pass without a step":
        loss(run.model, 7, rank).backward()
        run.optimizer.zero_grad()
    if act == "two passes":
        (loss(run.model, 2, rank) / 2).backward()
        (loss(run.model, 2, rank) / 2).backward()
    else:
        loss(run.model, 2, rank).backward()
    if act == "a checkpoint":
        sync.state_dict()
    elif act == "a flush":
        sync.flush()
        sync.resume()
    elif act == "a gradient written to":
        for p in run.model.parameters():
            p.grad.mul_(2).div_(2)  # type: ignore[union-attr]
    sync.step()
    run.step(3)
    return run.end()


@pytest.mark.parametrize(
    "act", ["a pass without a step", "two passes", "a checkpoint", "a flush", "a gradient written to"]
)
def test_what_happens_between_backward_and_step(act: str) -> None:
    """It changes nothing: the gradient that counts is the one that there is when the step is taken."""
    expected = on_ranks(train_with, GROUPS * SIZE, "nothing")
    for weights, without in zip(on_ranks(train_with, GROUPS * SIZE, act), expected, strict=True):
        assert_same(weights, without)
