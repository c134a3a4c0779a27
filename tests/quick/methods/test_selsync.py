"""SelSync on real processes against the simulation of Algorithm 1, bit for bit; what it sends, and what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import LocalSGD, SelSync
from lightning_pipesync.methods.replicas.step_size import EVERY
from tests.references.local_sgd import average_where_different
from tests.references.selsync import simulate
from tests.support.case_table import launch_cases
from tests.support.harness import raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS = 24
FINITE: dict[str, Any] = {"delta": 0.2, "smoothing": 0.3}
AUTO: dict[str, Any] = {"delta": "auto", "lssr": 0.9, "smoothing": 1.0}
GRADIENTS = {"aggregation": "gradients"}

#: By name: optimizer, settings, and those of the outer step in the simulation; by the name whether it is clipped.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "delta 0": ("sgd", {"delta": 0.0}, {}),
    "delta 0, gradients": ("adamw", {"delta": 0.0, **GRADIENTS}, {}),
    "finite": ("adamw", FINITE, {}),
    "finite, gradients": ("sgd", {**FINITE, **GRADIENTS}, {}),
    "auto": ("sgd", AUTO, {}),
    "auto, gradients": ("adamw", {**AUTO, **GRADIENTS}, {}),
    "auto, outer step": ("adamw", {**AUTO, "outer_momentum": 0.3}, {"outer_lr": 1.0, "outer_momentum": 0.3}),
    "infinite": ("adamw", {"delta": math.inf}, {}),
    "outer step": ("sgd", {**FINITE, "outer_lr": 0.7, "outer_momentum": 0.5}, {"outer_lr": 0.7, "outer_momentum": 0.5}),
    "outer step without momentum": ("sgd", {**FINITE, "outer_lr": 1.3}, {"outer_lr": 1.3}),
    "overlapped": ("adamw", {**FINITE, "overlap": "forward"}, {}),
    "overlapped outer step": (
        "sgd",
        {**FINITE, "overlap": "forward", "outer_momentum": 0.3},
        {"outer_lr": 1.0, "outer_momentum": 0.3},
    ),
    "parameter server": ("adamw", {**FINITE, "average": "server"}, {}),
    "clipped": ("sgd", FINITE, {}),
    "clipped, gradients": ("sgd", {**FINITE, **GRADIENTS}, {}),
    "no smoothing": ("sgd", {"delta": 0.3, "window": 2, "smoothing": 0.9}, {}),
    "little smoothing": ("sgd", {"delta": 0.1, "window": 5, "smoothing": 0.02}, {}),
}
#: By name which steps are synchronized, where it is not some.
SYNCHRONIZED = {"delta 0": "all", "delta 0, gradients": "all", "infinite": "none"}


def max_norm_of(name: str) -> float | None:
    return 0.1 if name.startswith("clipped") else None


def train(name: str, resumed_at: int | None) -> dict[str, Any]:
    """Trains STEPS steps; the ranks start from different weights, of which rank 0's count."""
    optimizer, settings, _ = CASES[name]
    run = Run(
        SelSync, optimizer, seeded_mlp(dist.get_rank(), batch_norm=True), bucket_mb=1e-4, lr_scale=1.0, **settings
    )
    synchronized, changes, deltas = [], [], []
    for i in range(STEPS):
        if i == resumed_at:
            run = run.resumed(seeded_mlp(9, batch_norm=True))
        run.backward(i)
        if max_norm := max_norm_of(name):
            run.sync.clip(max_norm)
        run.sync.step()
        synchronized.append(run.sync.last.synchronized)
        changes.append(run.sync.last.relative_change)
        deltas.append(run.sync.last.delta)
    own = state(run.model)
    run.sync.flush()
    flushed = state(run.model)
    run.sync.resume()
    assert_same(state(run.model), own)
    metrics = run.sync.metrics()
    run.sync.detach()
    return {"own": own, "flushed": flushed, "steps": (synchronized, deltas), "changes": changes, **metrics}


#: Which cases train uninterrupted on 2 ranks before each commit, and resumed on 3; by night it is the other way round.
FIRST, SECOND = list(CASES)[::2], list(CASES)[1::2]


@pytest.mark.parametrize(("world_size", "resumed_at", "names"), [(2, None, FIRST), (3, 13, SECOND)])
def test_follows_algorithm_1(world_size: int, resumed_at: int | None, names: list[str]) -> None:
    assert_follows_algorithm_1(world_size, resumed_at, names)


def assert_follows_algorithm_1(world_size: int, resumed_at: int | None, names: list[str]) -> None:
    """The same thresholds and decisions, and the same weights and buffers on every rank; also resumed.

    The consolidated weights are the average, from which each rank goes back to its own.
    """
    outcomes = launch_cases({name: partial(train, name, resumed_at) for name in names}, world_size)
    for name in names:
        optimizer, settings, outer = CASES[name]
        decides = {key: value for key, value in settings.items() if key in ("lssr", "window", "smoothing")}
        deltas: list[float] = []
        replicas, synchronized, changes = simulate(
            seeded_mlp(batch_norm=True),
            OPTIMIZERS[optimizer],
            loss,
            world_size=world_size,
            num_steps=STEPS,
            delta=settings["delta"],
            aggregation=settings.get("aggregation", "parameters"),
            clip=lambda model, name=name: (
                max_norm_of(name) and nn.utils.clip_grad_norm_(model.parameters(), max_norm_of(name))  # type: ignore[arg-type]
            ),
            deltas=deltas,
            **decides,
            **outer,
        )
        num_synchronized = sum(synchronized)
        expected = "all" if num_synchronized == STEPS else "some" if num_synchronized > 1 else "none"
        assert expected == SYNCHRONIZED.get(name, "some"), f"{name}: the test must see both kinds of step"
        own = [state(replica) for replica in replicas]
        average_where_different(replicas)
        for rank, outcome in enumerate(outcomes[name]):
            assert outcome["steps"] == (synchronized, deltas), name
            assert outcome["changes"] == pytest.approx([of_step[rank] for of_step in changes], rel=1e-4, abs=1e-6)
            assert_same(outcome["own"], own[rank], f"{name}, rank {rank}")
            assert_same(outcome["flushed"], replicas[0].state_dict(), f"{name}, rank {rank}, flushed")
            assert outcome["lssr"] == pytest.approx(1 - num_synchronized / STEPS)  # Eq. 4


def with_scaled_steps(method: str) -> tuple[dict[str, Any], float]:
    """Returns the replica after some steps of AdamW, and the factor on its learning rate."""
    makes: dict[str, Any] = {
        "selsync": lambda: Run(SelSync, "adamw", outer_momentum=0.0, partition="defdp"),
        "local_sgd": lambda: Run(LocalSGD, "adamw", period="selsync"),
    }
    run = makes[method]()
    for i in range(2 * EVERY + 1):
        run.step(i)
    scale = run.sync.metrics()["lr_scale"]
    run.sync.detach()
    return state(run.model), scale


def test_local_steps_of_adam_are_as_long_as_those_of_local_sgd() -> None:
    """Whose factor is measured, and whose trigger is SelSync's."""
    outcomes = launch_cases({name: partial(with_scaled_steps, name) for name in ("selsync", "local_sgd")}, 2)
    for (own, scale), (others, other) in zip(outcomes["selsync"], outcomes["local_sgd"], strict=True):
        assert scale == other > 1
        assert_same(own, others)


# --- what is sent -----------------------------------------------------------------------------------------------------


def traffic_of(**settings: Any) -> tuple[dict[str, int], dict[str, int], int]:
    """Returns the bytes and operations of 8 steps and a flush, and the number of synchronized steps."""
    run = Run(SelSync, **settings)
    run.steps(range(8))
    run.sync.flush()
    run.sync.detach()
    traffic = run.sync.transport.traffic
    return dict(traffic.bytes_sent), dict(traffic.operations), run.sync.num_synchronized_steps


def test_what_is_sent() -> None:
    """A local step sends a flag, and nothing else; a parameter server's link carries what all push and pull."""
    cases = {
        "local": partial(traffic_of, delta=1e9),
        "infinite": partial(traffic_of, delta=math.inf),
        "server": partial(traffic_of, delta=0.0, average="server"),
    }
    outcomes = launch_cases(cases, 3)
    for sent, operations, synchronized in outcomes["local"]:
        assert synchronized == 1
        assert sent["flags"] == 8 * 2  # that of the flush is beside the steps
        assert operations["all_reduce"] == 2  # the first step and the flush
    for sent, *_ in outcomes["infinite"]:
        assert "flags" not in sent
    server, *others = [sent["average_at"] for sent, *_ in outcomes["server"]]
    num_bytes = 8 * 4 * sum(parameter.numel() for parameter in seeded_mlp().parameters())
    assert server == sum(others)
    assert len(set(others)) == 1
    assert num_bytes <= others[0] < 1.5 * num_bytes, "small buckets are padded"


# --- gradients and parameters that are missing, shared, frozen or of several optimizers -------------------------------


class Heads(nn.Module):
    """A model of which each rank uses only one head, and nobody the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[dist.get_rank()](x)


def train_heads(aggregation: str) -> tuple[dict[str, Tensor], list[bool], list[int]]:
    run = Run(SelSync, "adamw", Heads(), delta=0.0, aggregation=aggregation)
    run.steps(range(3))
    present = [head.weight.grad is not None for head in run.model.heads]
    run.sync.detach()
    return state(run.model), present, list(run.optimizer.state_dict()["state"])


def train_frozen_and_tied() -> tuple[dict[str, Tensor], list[int]]:
    """Returns the weights, and the bytes of each of four steps, before the third of which a frozen layer changes."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    model[2].weight = model[0].weight  # tied
    model[1].requires_grad_(False)  # in no optimizer; a teacher, say
    trained = [p for p in model.parameters() if p.requires_grad]
    run = Run(SelSync, lambda _: torch.optim.SGD(trained, lr=0.01), model, delta=0.0)
    sent = []
    for i in range(4):
        if i == 2:
            with torch.no_grad():
                model[1].weight.add_(rank)
        before = run.sync.transport.traffic.total_bytes_sent
        run.step(i)
        run.sync.synchronize()
        sent.append(run.sync.transport.traffic.total_bytes_sent - before)
    assert model[2].weight is model[0].weight
    run.sync.detach()
    return state(model), sent


def train_two_optimizers() -> tuple[dict[str, Tensor], int, list[Any]]:
    model = seeded_mlp()
    first, second = torch.optim.SGD(model[0].parameters(), 0.05), torch.optim.AdamW(model[2].parameters(), 0.01)
    sync = SelSync(model, [first, second], delta=0.0)
    for i in range(5):
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            sync.step(optimizer=optimizer)
    errors = [raised(lambda: sync.step()), raised(lambda: sync.step(optimizer=torch.optim.SGD([torch.zeros(1)])))]
    sync.detach()
    return state(model), sync.num_synchronized_steps, errors


def overflow() -> tuple[list[Any], bool, float]:
    """Rank 1's gradient is infinite in a step, whose update it skips alone, as a GradScaler does."""
    run = Run(SelSync, lambda model: torch.optim.SGD(model.parameters(), lr=0.01), delta=0.5)
    seen = []
    for i in range(6):
        run.backward(i)
        if i == 3 and dist.get_rank() == 1:
            run.model[0].weight.grad[0, 0] = math.inf
        run.sync.reduce()
        finite = all(p.grad.isfinite().all() for p in run.model.parameters())  # type: ignore[union-attr]
        run.sync.step(run.optimizer.step if finite else lambda: None)
        seen.append((run.sync.last.synchronized, run.sync.last.not_finite))
    run.sync.detach()
    return seen, all(p.isfinite().all().item() for p in run.model.parameters()), run.sync.last.relative_change


def test_gradients_and_parameters_of_all_kinds() -> None:
    cases = {
        "gradients": partial(train_heads, "gradients"),
        "parameters": partial(train_heads, "parameters"),
        "frozen and tied": train_frozen_and_tied,
        "two optimizers": train_two_optimizers,
        "overflow": overflow,
    }
    outcomes = launch_cases(cases, 2)
    for name in cases:
        if name != "overflow":
            assert_same(outcomes[name][0][0], outcomes[name][1][0], name)
    for weights, present, with_state in outcomes["gradients"]:
        assert present == [True, True, False], "as in DDP: zero here if another rank has it; none, if no rank has"
        assert with_state == [0, 1, 2, 3]
        assert torch.equal(weights["heads.2.weight"], Heads().heads[2].weight)
    assert not torch.equal(outcomes["parameters"][1][0]["heads.0.weight"], Heads().heads[0].weight)
    trained, marks, written = (48 + 32 + 16) * 4, 2, 48 * 4  # each begins at a multiple of 64 bytes
    for _, sent in outcomes["frozen and tied"]:  # tied ones once; frozen ones only when some rank wrote to them
        assert sent == [1 + trained + marks + (written if i == 2 else 0) for i in range(4)]
    for _, steps, errors in outcomes["two optimizers"]:
        assert steps == 10
        assert all(error[0] == "ValueError" for error in errors)
    for seen, finite, change in outcomes["overflow"]:  # known to all, and blinds no tracker
        assert seen[3] == (True, True)
        assert [not_finite for _, not_finite in seen] == [False, False, False, True, False, False]
        assert finite
        assert math.isfinite(change)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low_rank": 1}, "low_rank=1 .*aggregation='parameters'"),
        ({"partition": "defdp", "full_pass": True}, "full_pass=True .*partition='defdp'"),
        *(
            ({"average": "server", name: value}, f"average='server' .*{name}={value!r}")
            for name, value in {
                "aggregation": "gradients",
                "compression": "int8",
                "outer_lr": 0.7,
                "outer_momentum": 0.3,
                "overlap": "forward",
            }.items()
        ),
    ],
)
def test_settings_that_exclude_each_other_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SelSync.config_type(**settings)
