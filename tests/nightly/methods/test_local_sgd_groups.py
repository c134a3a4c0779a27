"""Groups of ranks that train one replica: synchronized in each step, and averaged with other groups in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import LocalSGD, LocalSGDStrategy
from tests.quick.methods.test_local_sgd import for_reference, traffic_of
from tests.references.local_sgd import simulate
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.lightning_models import Classifier, train_loader, trainer
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

RANKS, SIZE, STEPS = 4, 2, 13
FRAGMENTS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]

#: By name: optimizer and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "averages": ("adamw", {"period": 3}),
    "DiLoCo": ("adamw", {"period": 3, "outer_optimizer": "nesterov"}),
    "after a warm-up": ("sgd", {"period": 3, "warmup_steps": 4}),
    "streaming": ("sgd", {"period": 4, "fragments": 2, "overlap_steps": 3, "outer_optimizer": "nesterov"}),
    "one group": ("adamw", {"period": 2, "participation": 0.5}),
    "EASGD": ("sgd", {"period": 2, "outer_optimizer": "elastic"}),
    "D-PSGD": ("sgd", {"period": 1, "neighbors": "ring", "overlap_steps": 1}),
}


def follow(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns this rank's weights, and the consolidated ones; resumed within a round."""
    optimizer, settings = CASES[name]
    run = Run(LocalSGD, optimizer, lr_scale=1.0, bucket_mb=1e-4, ranks_per_replica=SIZE, **settings)
    run.steps(range(8))
    run = run.resumed(seeded_mlp(1))
    run.steps(range(8, STEPS))
    return state(run.model), run.end()


def test_groups_follow_the_reference() -> None:
    outcomes = launch_cases({name: partial(follow, name) for name in CASES}, RANKS)
    for name, (optimizer, settings) in CASES.items():
        given = {"world_size": RANKS, "group_size": SIZE, **for_reference(settings, RANKS // SIZE, FRAGMENTS)}
        replicas, _ = simulate(seeded_mlp(), OPTIMIZERS[optimizer], loss, num_steps=STEPS, **given)
        for rank, (weights, consolidated) in enumerate(outcomes[name]):
            assert_same(weights, replicas[rank // SIZE].state_dict(), f"{name}, rank {rank}")
            assert_same(consolidated, outcomes[name][0][1], f"{name}, rank {rank}")


# --- as half as many ranks --------------------------------------------------------------------------------------------

#: What sends other values than the reference, too.
AS_RANKS: list[dict[str, Any]] = [
    {"period": 3, "compression": "int8", "outer_optimizer": "nesterov"},
    {"period": 3, "compression": "int8", "error_feedback": False},
    {"period": 4, "compression": "int4", "fragments": 2, "overlap_steps": 2, "mixing_factor": 0.5},
    {"period": "selsync", "delta": 0.2, "smoothing": 0.5},
    {"period": 3, "lr_scale": "auto"},
    {"period": 3, "average_optimizer_states": True},
]


def wide_network(seed: int = 0) -> nn.Module:
    """Two layers of 64 * 64 weights: each rank's shard, of 4 and of 2 ranks, is whole chunks of int8 and of int4."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))


def wide_loss(model: nn.Module, step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(8, 64, generator=generator) * (1 + (step * 7 + replica * 3) % 5)
    return (model(x) - x.roll(1, dims=1)).square().mean()


def train_as(settings: dict[str, Any], group_size: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], float]:
    """Returns the weights after each step, the consolidated ones, and the number of rounds; groups are resumed."""
    run = Run(LocalSGD, "adamw", wide_network(), ranks_per_replica=group_size, bucket_mb=1e-4, **settings)
    weights = []
    for i in range(STEPS):
        if i == 8:
            run.sync.flush()
            if group_size > 1:
                run = run.resumed(wide_network(1))
            else:
                run.sync.resume()
        run.optimizer.zero_grad()
        wide_loss(run.model, i, dist.get_rank() // group_size).backward()
        run.sync.step()
        weights.append(state(run.model))
    rounds = run.sync.metrics()["rounds"]
    return weights, run.end(), rounds


def test_groups_on_the_same_batches_are_half_as_many_ranks() -> None:
    """Bit for bit: the mean of equal gradients is that gradient, and the columns send what the ranks do.

    But for the sum of all ranks' optimizer states, which rounds otherwise: then the ranks of a group agree.
    """
    alone, grouped = (
        launch_cases({str(settings): partial(train_as, settings, size) for settings in AS_RANKS}, 2 * size)
        for size in (1, SIZE)
    )
    for settings in map(str, AS_RANKS):
        for rank, (weights, consolidated, rounds) in enumerate(grouped[settings]):
            expected, expected_consolidated, expected_rounds = alone[settings][rank // SIZE]
            assert 0 < rounds == expected_rounds
            for i, (own, of_rank) in enumerate(zip(weights, expected, strict=True)):
                if "states" not in settings:
                    assert_same(own, of_rank, f"{settings}, rank {rank}, step {i}")
                assert_same(own, grouped[settings][rank // SIZE * SIZE][0][i], f"{settings}, rank {rank}, step {i}")
            assert_same(consolidated, grouped[settings][0][1], rank)
            if "states" not in settings:
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


def test_the_averaged_gradient_of_the_group_counts() -> None:
    """It is clipped, it skips the step of the whole group, and SelSync measures it."""
    jumps = {"none": [0.0] * 4, "cancelled": [100.0, -100.0, 0.0, 0.0], "shared": [100.0, 100.0, 0.0, 0.0]}
    outcomes = launch_cases(
        {
            "clipped": clip_accumulated,
            "overflow": overflow_on_rank_1,
            **{name: partial(rounds_with_a_jump, jump) for name, jump in jumps.items()},
        },
        RANKS,
    )
    for group in range(RANKS // SIZE):
        members = outcomes["clipped"][group * SIZE : (group + 1) * SIZE]
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in members[0][0]]
        for parameter, first, second in zip(parameters, members[0][0], members[1][0], strict=True):
            assert not torch.equal(first, second)
            parameter.grad = (first + second) / 2
        norm = float(nn.utils.clip_grad_norm_(parameters, 0.1))
        assert norm > 0.1, "there is something to clip"
        for _, of_rank, clipped in members:
            assert of_rank == norm
            assert all(torch.equal(p.grad, value) for p, value in zip(parameters, clipped, strict=True))  # type: ignore[arg-type]
    for rank, (stepped, weights) in enumerate(outcomes["overflow"]):
        assert stepped == [rank // SIZE != 0, True, True], "a step nevertheless: the groups meet for their average"
        assert all(value.isfinite().all() for value in weights.values())
        assert_same(weights, outcomes["overflow"][0][1], rank)
    for rank, rounds in enumerate(outcomes["none"]):
        assert [outcomes["cancelled"][rank], outcomes["shared"][rank]] == [rounds, rounds + 1]


class SlowFirstLayer(torch.autograd.Function):
    """Between two layers; its backward pass goes on when some of a gradient is sent, or after a time without."""

    sent: Callable[[], float]
    seen: list[bool]

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        end = time.monotonic() + 60.0
        while not (sent := SlowFirstLayer.sent() > 100 / 2**20) and time.monotonic() < end:  # more than flags have
            time.sleep(0.01)
        SlowFirstLayer.seen.append(sent)
        return gradient


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


def test_gradients_are_averaged_under_the_backward_pass() -> None:
    """In a warm-up, too."""
    slow: dict[str, dict[str, Any]] = {"group": {"ranks_per_replica": SIZE}, "warm-up": {"warmup_steps": 2}}
    outcomes = launch_cases({name: partial(train_slowly, settings) for name, settings in slow.items()}, RANKS)
    for name in slow:
        assert outcomes[name] == [[True, True]] * RANKS, name


# --- what is sent, what is refused, a Trainer -------------------------------------------------------------------------


def out_of_step(act: str) -> tuple[str, str] | None:
    """Rank 1 consolidates, or loads weights, alone."""
    run = Run(LocalSGD, period=8, ranks_per_replica=SIZE, outer_optimizer="sgd", timeout_s=10)

    def drift() -> None:
        if dist.get_rank() == 1 and act == "flush":
            run.sync.flush()
        if dist.get_rank() == 1:
            run.model.load_state_dict(run.model.state_dict())
        run.steps(range(8))

    outcome = raised(drift)
    run.sync.detach()
    dist.barrier()
    return outcome


def attach(size: int) -> tuple[str, str] | None:
    return raised(lambda: Run(LocalSGD, ranks_per_replica=size))


def test_traffic_and_refusals() -> None:
    """Within a group, gradients of each step and what others averaged; half of the model crosses to the other group."""
    sparing = {"none": 1.0, "int8": 0.25}
    of_group = {"period": 4, "ranks_per_replica": SIZE}
    outcomes = launch_cases(
        {
            **{codec: partial(traffic_of, {**of_group, "compression": codec}) for codec in sparing},
            **{act: partial(out_of_step, act) for act in ("flush", "load")},
            **{size: partial(attach, size) for size in (3, 4)},
        },
        RANKS,
    )
    for codec, share in sparing.items():
        for grown in outcomes[codec]:
            between = grown["mib_between_groups"]
            assert between == pytest.approx(3 * share / 2, rel=0.02)
            assert grown["mib_sent"] - between == pytest.approx(12 + 3 / 2, rel=0.02)
    for act, words in (("flush", "is about to consolidate"), ("load", "has loaded weights")):
        for rank, outcome in enumerate(outcomes[act]):
            assert_raised(outcome, "RuntimeError", "ank 1" if rank > 1 else f"Rank 1 {words}")
    for size in (3, 4):
        for outcome in outcomes[size]:
            assert_raised(outcome, "ValueError", f"ranks_per_replica={size}", "1, 2")


def fit(directory: Path) -> tuple[Tensor, dict[str, float]]:
    strategy = LocalSGDStrategy(period=3, ranks_per_replica=SIZE, outer_optimizer="nesterov")
    model = Classifier()
    fitted = trainer(strategy, RANKS, directory, max_epochs=1)
    fitted.fit(model, train_loader())
    return model.weights(), {name: float(value) for name, value in fitted.logged_metrics.items()}


def test_in_a_trainer(tmp_path: Path) -> None:
    outcomes = on_ranks(fit, RANKS, tmp_path, init=False)
    for weights, metrics in outcomes:
        assert torch.equal(weights, outcomes[0][0])
        assert metrics["local_sgd/mib_between_groups"] < metrics["local_sgd/mib_sent"]
