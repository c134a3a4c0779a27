"""Groups of ranks that train one replica: synchronized in each step, and averaged with other groups in rounds."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import LocalSGD, LocalSGDStrategy
from tests.quick.methods.test_local_sgd import attach, for_reference, traffic_of
from tests.references.local_sgd import simulate
from tests.support.harness import DIED, assert_raised, launch, on_ranks, raised
from tests.support.lightning_models import Classifier, train_loader, trainer
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

RANKS, STEPS = 4, 13
FIRST, SECOND = ["0.weight", "0.bias"], ["2.weight", "2.bias"]

#: By name: optimizer and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "averages": ("adamw", {"period": 3}),
    "DiLoCo": ("adamw", {"period": 3, "outer_optimizer": "nesterov"}),
    "after a warm-up": ("sgd", {"period": 3, "warmup_steps": 4}),
    "streaming": ("sgd", {"period": 4, "fragments": 2, "overlap_steps": 3, "outer_optimizer": "nesterov"}),
    "one group": ("adamw", {"period": 2, "participation": 0.5}),
    "EASGD": ("sgd", {"period": 2, "outer_optimizer": "elastic"}),
}


def train(optimizer_name: str, settings: dict[str, Any], resumed_at: int | None = None) -> tuple[list[Any], Any]:
    """Returns this rank's weights after each step, and the consolidated ones."""

    def begin(seed: int) -> Run:
        given = {"lr_scale": 1.0, "bucket_mb": 1e-4, **settings}
        return Run(LocalSGD, optimizer_name, seeded_mlp(seed), ranks_per_replica=2, **given)

    run = begin(0)
    weights = []
    for i in range(STEPS):
        if i == resumed_at:
            run.sync.flush()
            consolidated, saved = state(run.model), copy.deepcopy(run.sync.state_dict())
            if settings["period"] == 3:  # an earlier version has written it
                saved["settings"]["replicas_per_group"] = saved["settings"].pop("ranks_per_replica")
            run.sync.detach()
            run = begin(1)
            run.model.load_state_dict(consolidated)
            run.sync.load_state_dict(saved)
        run.step(i)
        weights.append(state(run.model))
    return weights, run.end()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("resumed_at", [None, 8])
@pytest.mark.parametrize(("optimizer", "settings"), CASES.values(), ids=list(CASES))
def test_follows_the_reference(optimizer: str, settings: dict[str, Any], resumed_at: int | None) -> None:
    """Bit for bit, and the ranks of a group hold the same weights after each step."""
    given = {"world_size": RANKS, "num_steps": STEPS, "group_size": 2, **for_reference(settings, 2, [FIRST, SECOND])}
    replicas, _ = simulate(seeded_mlp(), OPTIMIZERS[optimizer], loss, **given)
    outcomes = on_ranks(train, RANKS, optimizer, settings, resumed_at)
    for rank, (weights, consolidated) in enumerate(outcomes):
        assert_same(weights[-1], replicas[rank // 2].state_dict(), rank)
        assert_same(consolidated, outcomes[0][1], rank)
        assert all(map(same, weights, outcomes[rank // 2 * 2][0])), rank


@pytest.mark.parametrize(
    "settings",
    [
        {"period": 3, "compression": "int8", "outer_optimizer": "nesterov"},
        {"period": 4, "compression": "int4", "fragments": 2, "overlap_steps": 2},
        {"period": 3, "compression": "chunked_topk", "outer_optimizer": "sgd", "outer_lr": 0.8},
        {"period": "selsync", "delta": 0.2},
        {"period": 3, "average_optimizer_states": True, "lr_scale": "auto"},
    ],
)
def test_groups_stay_together(settings: dict[str, Any]) -> None:
    """With what sends other values than the reference, too; resumed in the middle, bit for bit."""
    outcomes, resumed = (on_ranks(train, RANKS, "adamw", settings, at) for at in (None, 8))
    for rank, (weights, consolidated) in enumerate(outcomes):
        assert all(map(same, weights, outcomes[rank // 2 * 2][0]))
        assert_same(consolidated, outcomes[0][1])
        assert_same(resumed[rank][1], consolidated)
    assert not all(map(same, outcomes[0][0], outcomes[2][0])), "the groups' weights differ between averages"


@pytest.mark.parametrize(("compression", "share"), [("none", 1.0), ("int8", 0.25)])
def test_half_of_the_model_crosses_each_link_between_groups(compression: str, share: float) -> None:
    """Of three averages among two groups of two; within a group, gradients of each step, and what others averaged."""
    size = 4 * 100 * 100 * 4 / 2**20
    settings = {"period": 4, "compression": compression, "ranks_per_replica": 2}
    for grown in on_ranks(traffic_of, RANKS, settings):
        sent, between = grown["mib_sent"], grown["mib_between_groups"]
        assert between == pytest.approx(3 * share * size / 2, rel=0.02)
        assert sent - between == pytest.approx(12 * size + 3 * size / 2, rel=0.02)


def out_of_step(act: str) -> tuple[str, str] | None:
    """Rank 1 consolidates, or loads weights, alone."""
    run = Run(LocalSGD, period=8, ranks_per_replica=2, outer_optimizer="sgd", timeout_s=10)

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


@pytest.mark.parametrize(("act", "words"), [("flush", "is about to consolidate"), ("load", "has loaded weights")])
def test_a_rank_alone_is_named_by_its_group_at_once(act: str, words: str) -> None:
    for rank, outcome in enumerate(on_ranks(out_of_step, RANKS, act)):
        assert_raised(outcome, "RuntimeError", "ank 1" if rank > 1 else f"Rank 1 {words}")


def train_until_killed() -> tuple[str, str] | None:
    run = Run(LocalSGD, period=4, ranks_per_replica=2, timeout_s=5)

    def steps() -> None:
        try:
            run.steps(range(6))
            if dist.get_rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            run.steps(range(6, 100))
        finally:
            run.sync.detach()

    return raised(steps)


def test_a_killed_rank_is_named_in_all_groups() -> None:
    outcomes = launch(train_until_killed, RANKS, may_die=(3,))
    assert outcomes.pop() == DIED
    for outcome in outcomes:
        assert outcome is not None
        assert "Rank 3 (host " in outcome[1].splitlines()[-1]
        assert "has died" in outcome[1].splitlines()[-1]


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, ["ranks_per_replica must be"]), (3, ["ranks_per_replica=3", "1, 2"]), (4, ["ranks_per_replica=4"])],
)
def test_refusals(size: int, words: list[str]) -> None:
    for outcome in on_ranks(attach, RANKS, {"ranks_per_replica": size}):
        assert_raised(outcome, "ValueError", *words)


def fit(directory: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    strategy = LocalSGDStrategy(period=3, ranks_per_replica=2, outer_optimizer="nesterov")
    model = Classifier()
    fitted = trainer(strategy, RANKS, directory, max_epochs=1)
    fitted.fit(model, train_loader())
    return state(model), {name: float(value) for name, value in fitted.logged_metrics.items()}


def test_in_a_trainer(tmp_path: Path) -> None:
    pl.seed_everything(0)
    outcomes = on_ranks(fit, RANKS, tmp_path, init=False, timeout_s=240)
    for weights, metrics in outcomes:
        assert same(weights, outcomes[0][0])
        assert metrics["local_sgd/mib_between_groups"] < metrics["local_sgd/mib_sent"]
