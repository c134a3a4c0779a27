"""Ranks of local SGD raise when they cannot continue: one that was left out, all without rank 0, a Trainer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_pipesync import LocalSGD, LocalSGDConfig, LocalSGDStrategy
from lightning_pipesync.core.faults import membership
from lightning_pipesync.core.faults.heartbeat import Beat
from lightning_pipesync.training.session import MethodPlan
from tests.harness import DIED, assert_raised, launch, on_ranks, raised
from tests.lightning_models import Classifier, train_loader
from tests.lost_ranks import (
    INTERVAL,
    TIMEOUT_S,
    die,
    expect_loss,
    freeze,
    stopped,
    wait_for,
    wake,
    watch_processes,
)
from tests.models import OPTIMIZERS, Run, assert_same, seeded_mlp

STEPS, PERIOD, LOST_AT = 9, 2, 3


def train(folder: Path, victim: int, freezes: bool) -> dict[str, Any]:
    """Trains with a rank that dies, or that freezes until the others have ended."""
    rank = int(os.environ["RANK"])
    others = [other for other in range(int(os.environ["WORLD_SIZE"])) if other != victim]
    # The store is frozen with rank 0: each call waits for STORE_S. Rank 0 counts as cut off after PATIENCE beats.
    watch_processes(**({"STORE_S": 2.0, "PATIENCE": 1.0 / INTERVAL} if victim == 0 else {}))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    run = Run(LocalSGD, period=PERIOD, on_lost_rank="continue", timeout_s=TIMEOUT_S)
    sync, steps = run.sync, 0

    def loop() -> None:
        nonlocal steps
        for i in range(STEPS):
            if i == LOST_AT and rank == victim:
                freeze(folder) if freezes else die()
                if victim == 0:
                    wait_for(lambda: all((folder / f"{other} has left").exists() for other in others))
            elif i == LOST_AT and freezes:
                wait_for(lambda: stopped(folder / "frozen"))
                expect_loss(sync.transport)
            run.step(i)
            steps = i + 1
        sync.flush()

    outcome = raised(loop)
    (folder / f"{rank} has ended").touch()
    if freezes and rank == others[0]:
        wait_for(lambda: all((folder / f"{other} has ended").exists() for other in others))
        wake(folder)
        if victim != 0:  # it asks this rank's store
            wait_for((folder / f"{victim} has ended").exists)
    if freezes and victim == 0:
        assert sync._recovery is not None
        sync._recovery._membership._heartbeat._thread.join(TIMEOUT_S)  # with its last beat the rank has left
        (folder / f"{rank} has left").touch()
    sync.detach(timeout_s=1.0)
    return {"outcome": outcome, "steps": steps}


def test_a_rank_that_wakes_up_learns_that_it_was_left_out(tmp_path: Path) -> None:
    first, woken, last = launch(train, 3, tmp_path, 1, True, init=False)
    assert first["outcome"] is None
    assert last["outcome"] is None
    assert first["steps"] == last["steps"] == STEPS
    words = "Rank 1 did not answer in time", "rank 0, 2 continue without it"
    assert_raised(woken["outcome"], "RuntimeError", *words)
    assert woken["steps"] == LOST_AT, "it has not continued with weights of its own"


def test_without_rank_0_all_raise(tmp_path: Path) -> None:
    died, *others = launch(train, 3, tmp_path, 0, False, init=False, may_die=(0,))
    assert died == DIED
    for other in others:
        assert other["steps"] == LOST_AT
        assert other["outcome"][1].splitlines()[-1].startswith("The store of the job at 127.0.0.1")


def test_rank_0_raises_when_it_wakes_up_alone(tmp_path: Path) -> None:
    for outcome in launch(train, 3, tmp_path, 0, True, init=False):
        assert outcome["steps"] == LOST_AT
        assert outcome["outcome"][0] == "RuntimeError"


def test_a_rank_is_silent_when_no_beat_has_come_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(membership.time, "monotonic", lambda: now)
    silence = membership.Silence(patience_s=5)
    assert silence.of([Beat(1), Beat(1), Beat(1, left="")]) == {2}
    now += 5
    assert silence.of([Beat(2), Beat(1), Beat(1, left="")]) == {2}
    now += 1
    assert silence.of([Beat(2), Beat(1), Beat(2, left="")]) == {1, 2}
    assert silence.of([Beat(2), Beat(2), Beat(2, left="")]) == {2}


def train_undisturbed(on_lost_rank: str) -> tuple[dict[str, Any], dict[str, int]]:
    model = seeded_mlp(batch_norm=True)
    run = Run(LocalSGD, "sgd", model, period=PERIOD, outer_optimizer="nesterov", on_lost_rank=on_lost_rank)
    run.steps(range(STEPS))
    run.sync.flush()
    operations = dict(run.sync.transport.traffic.operations)
    assert ("ranks" in run.sync.metrics()) == (on_lost_rank == "continue")
    return run.end(), operations


def test_without_a_loss_the_weights_are_the_same() -> None:
    """At the price of a byte after each average, at the flush, and after the first step."""
    (weights, operations), (guarded, more) = (on_ranks(train_undisturbed, 2, how)[0] for how in ("raise", "continue"))
    assert_same(guarded, weights)
    assert more == {**operations, "flags": operations["flags"] + STEPS // PERIOD + 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_lost_rank": "ignore"}, ["on_lost_rank", "'ignore'"]),
        ({"on_lost_rank": "continue", "period": "selsync"}, ["on_lost_rank='continue'", "period='selsync'"]),
        ({"on_lost_rank": "continue", "injection": (0.5, 0.5)}, ["on_lost_rank='continue'", "injection=(0.5, 0.5)"]),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="on_lost_rank") as refused:
        LocalSGDConfig(**settings)
    assert all(word in str(refused.value) for word in words)


def fit(folder: Path) -> tuple[str, str] | None:
    strategy = LocalSGDStrategy(on_lost_rank="continue", process_group_backend="gloo")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=1, logger=False, default_root_dir=folder
    )
    return raised(lambda: trainer.fit(Classifier(), train_loader()))


def test_frameworks_refuse(tmp_path: Path) -> None:
    """All attach a method by its plan; a Trainer before it trains."""
    model = seeded_mlp()
    plan = MethodPlan("local_sgd", LocalSGDConfig(on_lost_rank="continue"), ranks_per_host=1)
    with pytest.raises(ValueError, match="on_lost_rank='continue' is for plain loops"):
        plan.attach(model, [OPTIMIZERS["sgd"](model)])
    [outcome] = launch(fit, 1, tmp_path, init=False)
    assert_raised(outcome, "ValueError", "on_lost_rank='continue' is for plain loops")
