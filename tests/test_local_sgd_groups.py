"""Groups of ranks that train one replica: synchronized in each step, and averaged with other groups in rounds."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync import LocalSGD, LocalSGDStrategy
from tests.harness import DIED, launch, raised
from tests.lightning_models import Classifier, train_loader, trainer
from tests.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.reference_local_sgd import simulate

RANKS, STEPS = 4, 13
FIRST, SECOND = ["0.weight", "0.bias"], ["2.weight", "2.bias"]
NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)

#: By name: optimizer, settings, and what the simulation is given.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "averages": ("adamw", {"period": 3}, {}),
    "DiLoCo": ("adamw", {"period": 3, "outer_optimizer": "nesterov"}, {"make_outer": NESTEROV}),
    "after a warm-up": ("sgd", {"period": 3, "warmup_steps": 4}, {}),
    "streaming": (
        "sgd",
        {"period": 4, "fragments": 2, "overlap_steps": 3, "outer_optimizer": "nesterov"},
        {"fragments": [FIRST, SECOND], "own_share": "progress", "make_outer": NESTEROV},
    ),
    "one group": ("adamw", {"period": 2, "participation": 0.5}, {"participants": 1}),
    "EASGD": (
        "sgd",
        {"period": 2, "outer_optimizer": "elastic"},
        {"elastic_force": 0.45, "make_outer": partial(SGD, lr=2 * 0.45)},
    ),
}


def train(optimizer_name: str, settings: dict[str, Any], resumed_at: int | None = None) -> tuple[list[Any], Any]:
    """Returns this rank's weights after each step, and the consolidated ones."""

    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
        model = seeded_mlp(seed)
        optimizer = OPTIMIZERS[optimizer_name](model)
        given = {"lr_scale": 1.0, "bucket_mb": 1e-4, **settings}
        return model, optimizer, LocalSGD(model, optimizer, ranks_per_replica=2, **given)

    model, optimizer, sync = begin(0)
    weights = []
    for i in range(STEPS):
        if i == resumed_at:
            sync.flush()
            consolidated, saved = state(model), copy.deepcopy(sync.state_dict())
            if settings["period"] == 3:  # an earlier version has written it
                saved["settings"]["replicas_per_group"] = saved["settings"].pop("ranks_per_replica")
            sync.detach()
            model, optimizer, sync = begin(1)
            model.load_state_dict(consolidated)
            sync.load_state_dict(saved)
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
        weights.append(state(model))
    sync.flush()
    sync.detach()
    return weights, state(model)


def train_cases(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("resumed_at", [None, 8])
def test_follows_the_reference(resumed_at: int | None) -> None:
    """Bit for bit, and the ranks of a group hold the same weights after each step."""
    outcomes = launch(train_cases, RANKS, [(*case[:2], resumed_at) for case in CASES.values()], timeout_s=240)
    for index, (name, (optimizer, settings, given)) in enumerate(CASES.items()):
        shared = {key: value for key, value in settings.items() if key in ("period", "warmup_steps", "overlap_steps")}
        replicas, _ = simulate(
            seeded_mlp(),
            OPTIMIZERS[optimizer],
            loss,
            world_size=RANKS,
            num_steps=STEPS,
            group_size=2,
            **{**shared, **given},  # type: ignore[arg-type]
        )
        of_ranks = [outcome[index] for outcome in outcomes]
        for rank, (weights, consolidated) in enumerate(of_ranks):
            assert same(weights[-1], replicas[rank // 2].state_dict()), (name, rank)
            assert same(consolidated, of_ranks[0][1]), (name, rank)
            assert all(map(same, weights, of_ranks[rank // 2 * 2][0])), (name, rank)


@pytest.mark.parametrize(
    "settings",
    [
        {"period": 3, "compression": "int8", "outer_optimizer": "nesterov"},
        {"period": 4, "compression": "int4", "fragments": 2, "overlap_steps": 2},
        {"period": "selsync", "delta": 0.2},
        {"period": 3, "average_optimizer_states": True, "lr_scale": "auto"},
    ],
)
def test_groups_stay_together(settings: dict[str, Any]) -> None:
    """With what sends other values than the reference, too; resumed in the middle, bit for bit."""
    outcomes, resumed = launch(train, RANKS, "adamw", settings), launch(train, RANKS, "adamw", settings, 8)
    for rank, (weights, consolidated) in enumerate(outcomes):
        assert all(map(same, weights, outcomes[rank // 2 * 2][0]))
        assert same(consolidated, outcomes[0][1])
        assert same(resumed[rank][1], consolidated)
    assert not all(map(same, outcomes[0][0], outcomes[2][0])), "the groups' weights differ between averages"


def traffic_of(settings: dict[str, Any]) -> tuple[float, float]:
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = LocalSGD(model, optimizer, ranks_per_replica=2, **settings)
    before = sync.metrics()
    for _ in range(12):
        model.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        sync.step()
    after = sync.metrics()
    sync.detach()
    return tuple(after[name] - before[name] for name in ("mib_sent", "mib_between_groups"))  # type: ignore[return-value]


@pytest.mark.parametrize(("compression", "share"), [("none", 1.0), ("int8", 0.25)])
def test_half_of_the_model_crosses_each_link_between_groups(compression: str, share: float) -> None:
    """Of three averages among two groups of two; within a group, gradients of each step, and what others averaged."""
    size = 4 * 100 * 100 * 4 / 2**20
    for sent, between in launch(traffic_of, RANKS, {"period": 4, "compression": compression}):
        assert between == pytest.approx(3 * share * size / 2, rel=0.02)
        assert sent - between == pytest.approx(12 * size + 3 * size / 2, rel=0.02)


def out_of_step() -> list[tuple[str, str] | None]:
    """Rank 1 consolidates, or loads weights, alone."""
    outcomes = []
    for act in ("flush", "load"):
        model = seeded_mlp()
        optimizer = OPTIMIZERS["sgd"](model)
        sync = LocalSGD(model, optimizer, period=8, ranks_per_replica=2, outer_optimizer="sgd", timeout_s=10)

        def drift(act: str = act, model: Any = model, sync: Any = sync) -> None:
            if dist.get_rank() == 1 and act == "flush":
                sync.flush()
            if dist.get_rank() == 1:
                model.load_state_dict(model.state_dict())
            for i in range(8):
                model.zero_grad()
                loss(model, i, dist.get_rank()).backward()
                sync.step()

        outcomes.append(raised(drift))
        sync.detach()
        dist.barrier()
    return outcomes


def test_a_rank_alone_is_named_by_its_group_at_once() -> None:
    for rank, outcomes in enumerate(launch(out_of_step, RANKS)):
        for outcome, words in zip(outcomes, ("is about to consolidate", "has loaded weights"), strict=True):
            assert outcome is not None
            assert "ank 1" in outcome[1]
            assert rank > 1 or f"Rank 1 {words}" in outcome[1], outcome


def train_until_killed() -> tuple[str, str] | None:
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=4, ranks_per_replica=2, timeout_s=5)

    def steps() -> None:
        try:
            for i in range(100):
                if i == 6 and dist.get_rank() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                model.zero_grad()
                loss(model, i, dist.get_rank()).backward()
                sync.step()
        finally:
            sync.detach()

    return raised(steps)


def test_a_killed_rank_is_named_in_all_groups() -> None:
    outcomes = launch(train_until_killed, RANKS, may_die=(3,))
    assert outcomes.pop() == DIED
    for outcome in outcomes:
        assert outcome is not None
        assert "Rank 3 (host " in outcome[1].splitlines()[-1]
        assert "has died" in outcome[1].splitlines()[-1]


def attach_with_each(sizes: list[int]) -> list[tuple[str, str] | None]:
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    outcomes = [raised(lambda: LocalSGD(model, optimizer, ranks_per_replica=size)) for size in sizes]  # noqa: B023
    dist.barrier()  # a process that ends breaks the connections that a slower one still makes
    return outcomes


def test_refusals() -> None:
    for outcomes in launch(attach_with_each, RANKS, [0, 3, 4]):
        for size, outcome in zip((0, 3, 4), outcomes, strict=True):
            assert outcome is not None
            assert outcome[0] == "ValueError"
            assert f"ranks_per_replica={size}" in outcome[1] or "ranks_per_replica must be" in outcome[1]
        assert "1, 2" in outcomes[1][1]  # type: ignore[index]


def fit(directory: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    strategy = LocalSGDStrategy(period=3, ranks_per_replica=2, outer_optimizer="nesterov")
    model = Classifier()
    fitted = trainer(strategy, RANKS, directory, max_epochs=1)
    fitted.fit(model, train_loader())
    return state(model), {name: float(value) for name, value in fitted.logged_metrics.items()}


def test_in_a_trainer(tmp_path: Path) -> None:
    pl.seed_everything(0)
    outcomes = launch(fit, RANKS, tmp_path, init=False, timeout_s=240)
    for weights, metrics in outcomes:
        assert same(weights, outcomes[0][0])
        assert metrics["local_sgd/mib_between_groups"] < metrics["local_sgd/mib_sent"]
