"""SelSync on real processes against the simulation of Algorithm 1."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.methods.selsync import SelSync
from tests.references.selsync import mean, simulate
from tests.support.harness import on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state, train_ddp

STEPS = 30


def train(
    optimizer_name: str, settings: dict[str, Any], batch_norm: bool = False, max_norm: float | None = None
) -> dict[str, Any]:
    """Trains STEPS steps; the ranks start from different weights, of which rank 0's count."""
    run = Run(SelSync, optimizer_name, seeded_mlp(dist.get_rank(), batch_norm), **settings)
    model, sync = run.model, run.sync
    synchronized, changes = [], []
    for i in range(STEPS):
        run.backward(i)
        if max_norm is not None:
            sync.clip(max_norm)
        sync.step()
        synchronized.append(sync.last.synchronized)
        changes.append(sync.last.relative_change)
    own = state(model)
    sync.flush()
    flushed = state(model)
    sync.resume()
    back = state(model)
    sync.detach()
    return {
        "own": own,
        "flushed": flushed,
        "back": back,
        "synchronized": synchronized,
        "changes": changes,
        "lssr": sync.lssr,
        "bytes": dict(sync.transport.traffic.bytes_sent),
        "operations": dict(sync.transport.traffic.operations),
    }


def assert_follows(
    optimizer: str,
    world_size: int,
    settings: dict[str, Any],
    batch_norm: bool = False,
    max_norm: float | None = None,
) -> list[bool]:
    """Asserts that training is the simulation, bit for bit; returns which steps were synchronized."""
    outcomes = on_ranks(train, world_size, optimizer, {"bucket_mb": 1e-4, **settings}, batch_norm, max_norm)
    replicas, synchronized, changes = simulate(
        seeded_mlp(batch_norm=batch_norm),
        OPTIMIZERS[optimizer],
        loss,
        world_size=world_size,
        num_steps=STEPS,
        clip=lambda model: max_norm and nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        **{name: value for name, value in settings.items() if name != "average"},
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome["synchronized"] == synchronized
        assert outcome["changes"] == pytest.approx([change[rank] for change in changes], rel=1e-4, abs=1e-6)
        assert_same(outcome["own"], state(replicas[rank]), rank)
        assert outcome["lssr"] == pytest.approx(1 - sum(synchronized) / STEPS)  # Eq. 4
    return synchronized


AGGREGATIONS = ("parameters", "gradients")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("delta", "optimizer", "world_size"),
    [*product([0.0, 0.2, 0.3], ["sgd", "adamw"], [2, 4]), (0.2, "adamw", 3)],
)
def test_follows_algorithm_1(delta: float, optimizer: str, world_size: int, aggregation: str) -> None:
    """The same decisions, and the same weights on every rank."""
    settings = {"delta": delta, "aggregation": aggregation, "smoothing": 0.3}
    synchronized = assert_follows(optimizer, world_size, settings)
    assert synchronized[0], "until there are two values every step is synchronized"
    if delta > 0:
        assert 1 < sum(synchronized) < STEPS, "the test must see both kinds of step"


@pytest.mark.parametrize(("optimizer", "world_size"), [("sgd", 2), ("adamw", 3)])
def test_the_parameter_server_of_algorithm_1(optimizer: str, world_size: int) -> None:
    """Rank 0 sums in the order of the ranks; its link carries what all push and pull."""
    settings = {"delta": 0.2, "smoothing": 0.3, "average": "server"}
    synchronized = assert_follows(optimizer, world_size, settings)
    assert 1 < sum(synchronized) < STEPS
    outcomes = on_ranks(train, world_size, optimizer, {"bucket_mb": 1e-4, **settings}, False, None)
    num_bytes = 4 * sum(parameter.numel() for parameter in seeded_mlp().parameters()) * sum(synchronized)
    server, *others = [outcome["bytes"]["average_at"] for outcome in outcomes]
    assert server == sum(others)
    assert len(set(others)) == 1
    assert num_bytes <= others[0] < 1.5 * num_bytes, "small buckets are padded"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"aggregation": "gradients"}, "aggregation='gradients'"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"outer_lr": 0.7}, "outer_lr=0.7"),
        ({"outer_momentum": 0.3}, "outer_momentum=0.3"),
        ({"overlap": "forward"}, "overlap='forward'"),
    ],
)
def test_what_a_parameter_server_does_not_do_is_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"average='server' pushes parameters .* {name} is for an all-reduce: set"):
        SelSync.config_type(average="server", **settings)
    adam = torch.optim.Adam(seeded_mlp().parameters())
    assert SelSync.config_type(average="server").outer_momentum_of(adam) == 0, "auto has no outer step"


@pytest.mark.parametrize("smoothing", [0.02, 0.16, 1.0])
@pytest.mark.parametrize("window", [1, 5, 25])
def test_window_and_smoothing_follow_algorithm_1(window: int, smoothing: float) -> None:
    assert_follows("sgd", 2, {"delta": 0.1, "window": window, "smoothing": smoothing})


def test_delta_zero_with_parameters_is_synchronous_sgd() -> None:
    """The average of the updated weights is the weights updated by the average, but for rounding."""
    expected = on_ranks(train_ddp, 2, "sgd", STEPS)[0]
    for outcome in on_ranks(train, 2, "sgd", {"delta": 0.0}):
        for name, value in expected.items():
            torch.testing.assert_close(outcome["own"][name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_delta_infinite_is_independent_training(aggregation: str) -> None:
    outcomes = on_ranks(train, 2, "adamw", {"delta": math.inf, "aggregation": aggregation})
    for rank, outcome in enumerate(outcomes):
        model = seeded_mlp()
        optimizer = OPTIMIZERS["adamw"](model)
        for i in range(STEPS):
            optimizer.zero_grad()
            loss(model, i, rank).backward()
            optimizer.step()
        assert_same(outcome["own"], state(model))
        assert outcome["lssr"] == 1.0
        assert "flags" not in outcome["bytes"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_clipping_follows_algorithm_1(aggregation: str) -> None:
    """The tracker sees the gradient before clipping; with gradients aggregated, the average is clipped."""
    assert_follows("sgd", 2, {"delta": 0.2, "aggregation": aggregation, "smoothing": 0.3}, max_norm=0.1)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_buffers_are_averaged_and_integers_follow_rank_0(aggregation: str) -> None:
    synchronized = assert_follows("sgd", 2, {"delta": 0.2, "aggregation": aggregation, "smoothing": 0.3}, True)
    assert 1 < sum(synchronized) < STEPS


def test_a_local_step_sends_the_flag_and_nothing_else() -> None:
    for outcome in on_ranks(train, 4, "sgd", {"delta": 1e9}):
        assert outcome["synchronized"] == [True] + [False] * (STEPS - 1)
        assert outcome["bytes"]["flags"] == (STEPS + 1) * 3  # one more with the flush
        assert outcome["operations"]["all_reduce"] == 2  # the first step and the flush


def test_flush_and_resume() -> None:
    outcomes = on_ranks(train, 3, "sgd", {"delta": 0.8, "smoothing": 0.3}, True)
    for name in outcomes[0]["own"]:
        values = [outcome["own"][name] for outcome in outcomes]
        expected = mean(values) if values[0].is_floating_point() else values[0]
        for outcome in outcomes:
            assert torch.equal(outcome["flushed"][name], expected)
            assert torch.equal(outcome["back"][name], outcome["own"][name])
    assert not torch.equal(outcomes[0]["own"]["0.weight"], outcomes[1]["own"]["0.weight"])


def write_while_flushed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = Run(SelSync, delta=1e9)
    run.steps(range(3))
    own = state(run.model)
    run.sync.flush()
    with torch.no_grad():
        run.model[0].bias.fill_(7.0)
    run.sync.resume()
    run.sync.detach()
    return own, state(run.model)


def test_what_is_written_while_flushed_stays() -> None:
    for own, resumed in on_ranks(write_while_flushed, 2):
        assert resumed["0.bias"].unique().tolist() == [7.0]
        assert torch.equal(resumed["0.weight"], own["0.weight"])


class TwoHeads(nn.Module):
    """A model of which each rank uses only one head, and nobody the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x)


def train_two_heads(aggregation: str) -> list[Any]:
    rank = dist.get_rank()
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sync = SelSync(model, optimizer, delta=0.0, aggregation=aggregation)
    x = torch.ones(4, 6) * (rank + 1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x, rank).square().sum().backward()
        sync.step()
    present = [head.weight.grad is not None for head in model.heads]
    sync.detach()
    return [state(model), present, list(optimizer.state_dict()["state"])]


def test_parameters_without_a_gradient() -> None:
    """As in DDP: a gradient that another rank has counts as zero here; what no rank uses is left alone."""
    outcomes = on_ranks(train_two_heads, 2, "gradients")
    for weights, present, with_state in outcomes:
        assert present == [True, True, False]
        assert with_state == [0, 1, 2, 3]
        assert_same(weights, outcomes[0][0])
        assert torch.equal(weights["heads.2.weight"], TwoHeads().heads[2].weight)


def test_parameters_without_a_gradient_are_averaged() -> None:
    outcomes = on_ranks(train_two_heads, 2, "parameters")
    assert_same(outcomes[0][0], outcomes[1][0])
    assert not torch.equal(outcomes[0][0]["heads.0.weight"], TwoHeads().heads[0].weight)


def train_frozen_and_tied() -> list[Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    model[2].weight = model[0].weight  # tied
    model[1].requires_grad_(False)  # in no optimizer; a teacher, say
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    sync = SelSync(model, optimizer, delta=0.0)
    sent = []
    for i in range(4):
        optimizer.zero_grad()
        loss(model, i, rank).backward()
        if i == 2:
            with torch.no_grad():
                model[1].weight.add_(rank)
        before = sync.transport.traffic.total_bytes_sent
        sync.step()
        sync.synchronize()
        sent.append(sync.transport.traffic.total_bytes_sent - before)
    assert model[2].weight is model[0].weight
    sync.detach()
    return [state(model), sent]


def test_tied_and_frozen_parameters() -> None:
    """Tied ones travel once. Ones that no optimizer has travel only when some rank wrote to them."""
    outcomes = on_ranks(train_frozen_and_tied, 2)
    assert_same(outcomes[0][0], outcomes[1][0])
    trained, marks, written = (48 + 32 + 16) * 4, 2, 48 * 4  # each begins at a multiple of 64 bytes
    for _, sent in outcomes:
        for i, num_bytes in enumerate(sent):
            assert num_bytes == 1 + trained + marks + (written if i == 2 else 0)


def overflow() -> list[Any]:
    run = Run(SelSync, lambda model: torch.optim.SGD(model.parameters(), lr=0.01), delta=0.5)
    model, sync = run.model, run.sync
    seen = []
    for i in range(6):
        run.backward(i)
        if i == 3 and dist.get_rank() == 1:
            model[0].weight.grad[0, 0] = math.inf
        sync.reduce()
        # as a GradScaler does: skip the update on this rank
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        sync.step(run.optimizer.step if finite else lambda: None)
        seen.append((sync.last.synchronized, sync.last.not_finite))
    finite = all(p.isfinite().all().item() for p in model.parameters())
    change = sync.last.relative_change
    sync.detach()
    return [seen, finite, math.isfinite(change)]


def test_an_overflow_on_one_rank_is_known_to_all_and_blinds_no_tracker() -> None:
    for seen, finite, tracks in on_ranks(overflow, 2):
        assert seen[3] == (True, True)
        assert [not_finite for _, not_finite in seen] == [False, False, False, True, False, False]
        assert finite
        assert tracks


def two_optimizers() -> list[Any]:
    rank = dist.get_rank()
    model = seeded_mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.05)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    sync = SelSync(model, [first, second], delta=0.0)
    for i in range(5):
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss(model, i, rank).backward()
            sync.step(optimizer=optimizer)
    errors = [raised(lambda: sync.step()), raised(lambda: sync.step(optimizer=torch.optim.SGD([torch.zeros(1)])))]
    sync.detach()
    return [state(model), sync.num_synchronized_steps, errors]


def test_several_optimizers() -> None:
    outcomes = on_ranks(two_optimizers, 2)
    assert_same(outcomes[0][0], outcomes[1][0])
    for _, steps, errors in outcomes:
        assert steps == 10
        assert all(error[0] == "ValueError" for error in errors)
