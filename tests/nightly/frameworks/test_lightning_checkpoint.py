"""Checkpoints are normal checkpoints, and a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor

from lightning_pipesync import SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import Classifier, scaling, train_loader, trainer, val_loader

# 64 samples, 2 ranks, batches of 4: 8 batches an epoch. A change of 0.1 gives steps of both kinds.
MIXED = {"delta": 0.1, "smoothing": 0.3}
MODULE = {"optimizer": "adamw", "batch_norm": True, "dropout": 0.3, "scheduler": True}
SGD = {"optimizer": "sgd"}

#: When the checkpoint is written, after how many steps, and after how many batches.
MOMENTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "mid-epoch": ({"every_n_train_steps": 5}, 5, 5),
    "second epoch": ({"every_n_train_steps": 11}, 11, 11),
    "last batch": ({"every_n_train_steps": 8}, 8, 8),
    "validation": ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, 8, 8),
    "mid-epoch validation": ({"save_on_train_epoch_end": False}, 4, 4),
    "accumulated": ({"every_n_train_steps": 5}, 5, 10),
    # By its mode, which has no effect, a Trainer tells it from the one of the validation.
    "epoch end": ({"every_n_epochs": 1, "save_on_train_epoch_end": True, "mode": "max"}, 8, 8),
    "epoch end without validation": ({"every_n_epochs": 1}, 8, 8),
}


@dataclass(frozen=True)
class Case:
    """A training, and the moments from which it is resumed."""

    moments: tuple[str, ...]
    module: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    ema: bool = False
    scaled: bool = False
    loader: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "everything": Case(("mid-epoch", "second epoch", "validation", "epoch end"), MODULE),
    # Lightning does not make good the validation that was due, and its loader would have drawn a random number.
    "last batch": Case(("last batch",), {**MODULE, "dropout": 0.0}),
    "validation within": Case(("mid-epoch validation",), MODULE, arguments={"val_check_interval": 0.5}),
    "no validation": Case(("epoch end without validation",), MODULE, arguments={"limit_val_batches": 0}),
    "full pass, EMA": Case(("mid-epoch",), {**SGD, "batch_norm": True}, {"full_pass": True}, ema=True),
    "injection, loss scaling": Case(("mid-epoch",), SGD, {"partition": "seldp", "injection": (0.5, 0.5)}, scaled=True),
}
#: Worker processes have fetched ahead of training when the checkpoint is written.
WITH_WORKERS = Case(
    ("accumulated",),
    SGD,
    loader={"num_workers": 1, "batch_size": 2},
    arguments={"accumulate_grad_batches": 2},
)


def run(
    directory: Path,
    settings: dict[str, Any],
    savers: dict[str, dict[str, Any]],
    case: Case,
    resume_from: Path | None = None,
    epochs: int = 2,
) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(100 + rank)  # dropout differs by rank
    model = Classifier(**case.module)
    torch.manual_seed(100 + rank)
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.8)] if case.ema else []
    callbacks += [
        ModelCheckpoint(directory / name, filename="{step}", save_top_k=-1, **how) for name, how in savers.items()
    ]
    fitting = trainer(
        SelSyncStrategy(**settings),
        int(os.environ["WORLD_SIZE"]),
        directory,
        callbacks=callbacks,
        enable_checkpointing=True,
        max_epochs=epochs,
        plugins=[scaling()] if case.scaled else [],
        **case.arguments,
    )
    with mock.patch.dict(os.environ):  # a Trainer removes what a launcher has set
        fitting.fit(model, train_loader(**case.loader), val_loader(), ckpt_path=resume_from)
    metrics = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return {"weights": model.weights(), "seen": model.seen, "validated_with": model.validated_with, "metrics": metrics}


def run_case(directory: Path, case: Case, resumed: str | None = None) -> dict[str, Any]:
    """Runs some epochs at once, or again from the checkpoint of a moment."""
    settings, savers = {**MIXED, **case.settings}, {moment: MOMENTS[moment][0] for moment in case.moments}
    if resumed is None:
        return run(directory, settings, savers, case)
    path = directory / resumed / f"step={MOMENTS[resumed][1]}.ckpt"
    assert path.exists(), list(directory.rglob("*"))
    return run(directory / "resumed" / resumed, settings, savers, case, path)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        (name, moment): partial(run_case, folder / name, case, moment)
        for name, case in CASES.items()
        for moment in (None, *case.moments)
    }
    cases |= {how: partial(how, folder / how.__name__) for how in (local_steps, save_and_resume_wrongly, fit_saving)}
    return launch_cases(cases, 2, init=False)


def assert_resumed(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], moment: str) -> None:
    for first, second in zip(whole, resumed, strict=True):
        assert second["seen"]
        assert second["seen"] == first["seen"][MOMENTS[moment][2] :], "the next unseen batch, and no other"
        assert torch.equal(second["weights"], first["weights"])
        assert "selsync/lssr" in first["metrics"]
        for name in ("selsync/lssr", "loss", "val_loss"):
            assert second["metrics"].get(name) == first["metrics"].get(name)


@pytest.mark.parametrize(
    ("name", "moment"), [(name, moment) for name, case in CASES.items() for moment in case.moments]
)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, moment: str, trained: Outcomes) -> None:
    """Per-rank weights, optimizer state, tracker, BatchNorm, dropout, schedule and the place in the queue."""
    assert_resumed(trained[name, None], trained[name, moment], moment)


def test_resume_with_workers_and_accumulation(tmp_path: Path) -> None:
    """In new processes, as workers are forked: what has trained before has had threads."""
    whole, resumed = (on_ranks(run_case, 2, tmp_path, WITH_WORKERS, at, init=False) for at in (None, "accumulated"))
    assert_resumed(whole, resumed, "accumulated")


def local_steps(directory: Path) -> dict[str, Any]:
    """Two epochs of local steps, with checkpoints of all replicas; and in two parts, without replicas."""
    settings, case = {"delta": 1e9}, Case((), {})
    savers = {"step": {"every_n_train_steps": 3}, "epoch": MOMENTS["validation"][0]}
    small = {**settings, "checkpoint_replicas": False}
    savers_of_small = {"small": {"every_n_epochs": 1}}
    run(directory, small, savers_of_small, case, epochs=1)
    return {
        "whole": run(directory, settings, savers, case),
        "without replicas": run(directory / "again", small, savers_of_small, case, directory / "small" / "step=8.ckpt"),
    }


def replicas_in(path: Path) -> list[Tensor]:
    ranks = torch.load(path, weights_only=True)["pipesync"]["ranks"]
    assert sorted(ranks) == [0, 1]
    own = [ranks[rank]["method"]["units"][0]["fragments"]["replicas"]["own"] for rank in sorted(ranks)]
    return [torch.cat([value.flatten() for bucket in buckets for value in bucket]) for buckets in own]


def test_a_checkpoint_holds_the_average_and_each_replica(trained: Outcomes, folder: Path) -> None:
    """Without replicas it is small, and ranks resume from the average."""
    first, second = trained[local_steps]
    path = folder / local_steps.__name__
    saved = torch.load(path / "epoch" / "step=8.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), first["whole"]["validated_with"][0])
    one, other = replicas_in(path / "step" / "step=3.ckpt")
    assert not torch.equal(one, other)
    assert "ranks" not in torch.load(path / "small" / "step=8.ckpt", weights_only=True)["pipesync"]
    assert torch.equal(first["without replicas"]["weights"], second["without replicas"]["weights"])


def resume_wrongly(directory: Path, settings: dict[str, Any]) -> tuple[str, str] | None:
    path = directory / "saved" / "step=8.ckpt"
    return raised(lambda: run(directory, {**MIXED, **settings}, {}, Case((), {}), path))


def save_and_resume_wrongly(directory: Path) -> tuple[str, str] | None:
    run(directory, MIXED, {"saved": {"every_n_epochs": 1}}, Case((), {}), epochs=1)
    return resume_wrongly(directory, {"compression": "int8"})


def test_what_cannot_be_resumed_is_named(trained: Outcomes, folder: Path) -> None:
    for outcome in trained[save_and_resume_wrongly]:
        assert_refused({"int8": outcome})
    for outcome in on_ranks(resume_wrongly, 3, folder / save_and_resume_wrongly.__name__, {}, init=False):
        assert_refused({"2 ranks": outcome})
        assert_refused({"3": outcome})


class Saving(Classifier):
    """Saves a checkpoint in the midst of a step, and watches the weights that training goes on from."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves = saves
        self.watched: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.saves and batch_idx in (2, 3):
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"{batch_idx}.ckpt")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.watched.append(self.weights())


def fit_saving(directory: Path) -> list[tuple[list[Tensor], Tensor]]:
    """Returns what was watched, and the weights, without saving and with it."""
    outcomes = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = Saving(saves)
        callbacks = [ModelCheckpoint(directory / "every", save_top_k=-1, every_n_train_steps=1)] if saves else []
        fitting = trainer(SelSyncStrategy(**MIXED), 2, directory, callbacks=callbacks, enable_checkpointing=saves)
        fitting.fit(model, train_loader(), val_loader())
        outcomes.append((model.watched, model.weights()))
    return outcomes


def test_saving_changes_nothing(trained: Outcomes, folder: Path) -> None:
    """Neither what training goes on from, nor what comes to see the weights after the checkpoint was written."""
    for plain, saving in trained[fit_saving]:
        for before, after in zip(plain[0], saving[0], strict=True):
            assert torch.equal(before, after)
        assert torch.equal(plain[1], saving[1])
    assert (folder / fit_saving.__name__ / "3.ckpt").exists()
