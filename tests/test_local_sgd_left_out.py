"""Who cannot go on when a rank of local SGD is lost raises: a rank that was left out, all without rank 0, a Trainer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_pipesync import LocalSGD, LocalSGDConfig, LocalSGDStrategy
from lightning_pipesync.training.session import MethodPlan
from tests.harness import DIED, launch, raised
from tests.lightning_models import Classifier, train_loader
from tests.models import OPTIMIZERS, loss, seeded_mlp, state

TIMEOUT_S = 4
STEPS, PERIOD, LOST_AT = 9, 2, 3


def freeze(folder: Path) -> None:
    (folder / "frozen").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wake_and_await(folder: Path) -> None:
    """Wakes the frozen rank, and waits until it has raised."""
    os.kill(int((folder / "frozen").read_text()), signal.SIGCONT)
    deadline = time.monotonic() + 60
    while not (folder / "raised").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def train(folder: Path, victim: int, befall: Callable[[Path], None], waker: int, on_lost_rank: str) -> dict[str, Any]:
    """Trains with a rank that something befalls; another one wakes it at the end, or once it has raised itself."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, on_lost_rank=on_lost_rank, timeout_s=TIMEOUT_S)
    steps = 0

    def loop() -> None:
        nonlocal steps
        for i in range(STEPS):
            if i == LOST_AT and rank == victim:
                befall(folder)
            optimizer.zero_grad()
            loss(model, i, rank).backward()
            sync.step()
            steps = i + 1
        sync.flush()

    outcome = raised(loop)
    if rank == victim:
        (folder / "raised").touch()
    if rank == waker:
        wake_and_await(folder)
    sync.detach(timeout_s=1.0)
    return {"outcome": outcome, "steps": steps, "metrics": sync.metrics()}


def test_a_rank_that_wakes_up_learns_that_it_was_left_out(tmp_path: Path) -> None:
    first, woken, last = launch(train, 3, tmp_path, 1, freeze, 0, "continue", init=False)
    assert first["outcome"] is None
    assert last["outcome"] is None
    assert first["steps"] == last["steps"] == STEPS
    kind, message = woken["outcome"]
    assert kind == "RuntimeError"
    assert "Rank 1 did not answer in time" in message
    assert "rank 0, 2 continue without it" in message
    assert woken["steps"] == LOST_AT, "it has not gone on with weights of its own"


def test_without_rank_0_all_raise(tmp_path: Path) -> None:
    died, *others = launch(train, 3, tmp_path, 0, kill, -1, "continue", init=False, may_die=(0,))
    assert died == DIED
    for other in others:
        assert other["steps"] == LOST_AT
        assert other["outcome"][1].splitlines()[-1].startswith("The store of the job at 127.0.0.1")


def test_rank_0_raises_when_it_wakes_up_alone(tmp_path: Path) -> None:
    outcomes = launch(train, 3, tmp_path, 0, freeze, 1, "continue", init=False)
    for outcome in outcomes:
        assert outcome["steps"] == LOST_AT
        assert outcome["outcome"][0] == "RuntimeError"


def test_all_raise_by_default(tmp_path: Path) -> None:
    first, died, last = launch(train, 3, tmp_path, 1, kill, -1, "raise", init=False, may_die=(1,))
    assert died == DIED
    for outcome in (first, last):
        assert outcome["steps"] == LOST_AT
        assert outcome["outcome"][1].splitlines()[-1].startswith("Rank 1 (host ")
        assert "ranks" not in outcome["metrics"]


def train_undisturbed(on_lost_rank: str) -> tuple[dict[str, Any], dict[str, int]]:
    model = seeded_mlp(batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, outer_optimizer="nesterov", on_lost_rank=on_lost_rank)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    sync.flush()
    operations = dict(sync.transport.traffic.operations)
    sync.detach()
    return state(model), operations


def test_without_a_loss_the_weights_are_the_same() -> None:
    """At the price of a byte after each average, at the flush, and after the first step."""
    (weights, operations), (guarded, more) = (launch(train_undisturbed, 2, how)[0] for how in ("raise", "continue"))
    assert all(weights[name].equal(guarded[name]) for name in weights)
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
    outcome = launch(fit, 1, tmp_path, init=False)[0]
    assert outcome is not None
    kind, message = outcome
    assert kind == "ValueError"
    assert "on_lost_rank='continue' is for plain loops" in message
