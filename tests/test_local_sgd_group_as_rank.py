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
from tests.harness import launch
from tests.models import OPTIMIZERS, loss, seeded_mlp, state

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
    model = wide_network()
    optimizer = OPTIMIZERS["adamw"](model)
    sync = LocalSGD(model, optimizer, ranks_per_replica=group_size, bucket_mb=1e-4, **settings)
    weights = []
    for i in range(STEPS):
        optimizer.zero_grad()
        wide_loss(model, i, dist.get_rank() // group_size).backward()
        sync.step()
        weights.append(state(model))
    rounds = sync.metrics()["rounds"]
    sync.flush()
    sync.detach()
    return weights, state(model), rounds


def train_each(cases: list[dict[str, Any]], group_size: int) -> list[Any]:
    return [train(settings, group_size) for settings in cases]


def test_groups_on_the_same_batches_are_half_as_many_ranks() -> None:
    """Bit for bit: the mean of equal gradients is that gradient, and the columns send what the ranks do."""
    cases: list[dict[str, Any]] = [
        {"period": 3, "compression": "int8", "outer_optimizer": "nesterov"},
        {"period": 3, "compression": "int8", "error_feedback": False},
        {"period": 4, "compression": "int4", "fragments": 2, "overlap_steps": 2, "own_share": 0.5},
        {"period": 2, "participation": 0.5},
        {"period": "selsync", "delta": 0.2, "smoothing": 0.5},
        {"period": 3, "lr_scale": "auto"},
    ]
    alone = launch(train_each, GROUPS, cases, 1)
    grouped = launch(train_each, GROUPS * SIZE, cases, SIZE)
    for index, settings in enumerate(cases):
        for rank in range(GROUPS * SIZE):
            weights, consolidated, rounds = grouped[rank][index]
            expected, expected_consolidated, expected_rounds = alone[rank // SIZE][index]
            assert 0 < rounds == expected_rounds, (settings, rank)
            for i, (own, of_rank) in enumerate(zip(weights, expected, strict=True)):
                torch.testing.assert_close(own, of_rank, rtol=0, atol=0, msg=f"{settings}, rank {rank}, step {i}")
            torch.testing.assert_close(consolidated, expected_consolidated, rtol=0, atol=0)


# --- its gradient -----------------------------------------------------------------------------------------------------


def clip_accumulated() -> tuple[list[Tensor], float, list[Tensor]]:
    """Returns this rank's gradient of two batches, the norm by which it is clipped, and the clipped gradient."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=4, ranks_per_replica=SIZE)
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
    outcomes = launch(clip_accumulated, GROUPS * SIZE)
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
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=3, ranks_per_replica=SIZE)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stepped = []
    for i in range(3):
        before = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss(model, i, dist.get_rank())).backward()
        if i == 0 and dist.get_rank() == 1:
            next(model.parameters()).grad[0] = torch.inf  # type: ignore[index]
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))
        scaler.update()
        stepped.append(scaler.get_scale() == before)
    weights = state(model)
    sync.detach()
    return stepped, weights


def test_an_overflow_skips_the_step_of_the_whole_group() -> None:
    """It is a step nevertheless: the groups meet for their average."""
    outcomes = launch(overflow_on_rank_1, GROUPS * SIZE)
    for rank, (stepped, weights) in enumerate(outcomes):
        assert stepped == [rank // SIZE != 0, True, True]
        assert all(value.isfinite().all() for value in weights.values())
        torch.testing.assert_close(weights, outcomes[0][1], rtol=0, atol=0)


def rounds_with_a_jump(jumps: list[list[float]]) -> list[float]:
    """Returns the number of rounds if this rank's gradient, which is 1, changes by its jump in the last step."""
    numbers = []
    for jump in jumps:
        model = nn.Linear(1, 1, bias=False)
        optimizer = OPTIMIZERS["sgd"](model)
        settings: dict[str, Any] = {"period": "selsync", "delta": 1.0, "window": 2, "smoothing": 0.5}
        sync = LocalSGD(model, optimizer, ranks_per_replica=SIZE, **settings)
        for i in range(8):
            optimizer.zero_grad()
            (model.weight.sum() * (1 + jump[dist.get_rank()] * (i == 7))).backward()
            sync.step()
        numbers.append(sync.metrics()["rounds"])
        sync.detach()
    return numbers


def test_selsync_measures_the_averaged_gradient_of_the_group() -> None:
    """Jumps that cancel each other in their group trigger nothing."""
    jumps = [[0.0, 0.0, 0.0, 0.0], [100.0, -100.0, 0.0, 0.0], [100.0, 100.0, 0.0, 0.0]]
    for none, cancelled, shared in launch(rounds_with_a_jump, GROUPS * SIZE, jumps):
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
    for default, of_one, of_two in launch(number_of_process_groups, GROUPS * SIZE, [None, 1, SIZE]):
        assert default == of_one == 1
        assert of_two == 1 + GROUPS + SIZE, "a row for each group, and a column for each place in it"


class SlowFirstLayer(torch.autograd.Function):
    """Between two layers; its backward pass goes on when some of a gradient is sent, or after a time without."""

    sent: Callable[[], float]

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        end = time.monotonic() + WAIT_S
        while not (sent := SlowFirstLayer.sent() > LEAST) and time.monotonic() < end:
            time.sleep(0.01)
        SENT_UNDER_BACKWARD.append(sent)
        return gradient


SENT_UNDER_BACKWARD: list[bool] = []
WAIT_S = 20.0
LEAST = 100 / 2**20  # MiB, more than flags have


def train_slowly(settings: dict[str, Any]) -> list[bool]:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, last)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, bucket_mb=1e-4, period=100, **settings)
    for _ in range(2):
        before = sync.metrics()["mib_sent"]
        SlowFirstLayer.sent = lambda before=before: sync.metrics()["mib_sent"] - before  # type: ignore[misc]
        optimizer.zero_grad()
        last(SlowFirstLayer.apply(first(torch.ones(2, 8)))).sum().backward()  # type: ignore[no-untyped-call]
        sync.step()
    sync.detach()
    return SENT_UNDER_BACKWARD


@pytest.mark.parametrize("settings", [{"ranks_per_replica": SIZE}, {"warmup_steps": 2}])
def test_gradients_are_averaged_under_the_backward_pass(settings: dict[str, Any]) -> None:
    assert launch(train_slowly, GROUPS * SIZE, settings) == [[True, True]] * (GROUPS * SIZE)


def train_with(act: str) -> dict[str, Tensor]:
    """Takes 4 steps; between the backward pass and the third one something else happens, on all ranks."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, bucket_mb=1e-4, period=2, ranks_per_replica=SIZE, outer_optimizer="nesterov")
    for i in range(4):
        optimizer.zero_grad()
        if i == 2 and act == "a pass without a step":
            loss(model, 7, dist.get_rank()).backward()
            optimizer.zero_grad()
        if i == 2 and act == "two passes":
            (loss(model, i, dist.get_rank()) / 2).backward()
            (loss(model, i, dist.get_rank()) / 2).backward()
        else:
            loss(model, i, dist.get_rank()).backward()
        if i == 2 and act == "a checkpoint":
            sync.state_dict()
        if i == 2 and act == "a flush":
            sync.flush()
            sync.resume()
        if i == 2 and act == "a gradient written to":
            for p in model.parameters():
                p.grad.mul_(2).div_(2)  # type: ignore[union-attr]
        sync.step()
    sync.flush()
    sync.detach()
    return state(model)


def test_what_happens_between_backward_and_step() -> None:
    """It changes nothing: the gradient that counts is the one that there is when the step is taken."""
    expected = launch(train_with, GROUPS * SIZE, "nothing")
    for act in ("a pass without a step", "two passes", "a checkpoint", "a flush", "a gradient written to"):
        outcomes = launch(train_with, GROUPS * SIZE, act)
        for weights, without in zip(outcomes, expected, strict=True):
            torch.testing.assert_close(weights, without, rtol=0, atol=0, msg=act)
