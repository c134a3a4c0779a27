"""Checkpoints are normal checkpoints, and a resumed run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor

from lightning_pipesync import SelSyncStrategy
from tests.harness import launch, raised
from tests.lightning_models import Classifier, scaling, train_loader, trainer, val_loader

# 64 samples, 2 ranks, batches of 4: 8 batches an epoch. A change of 0.1 gives steps of both kinds.
MIXED = {"delta": 0.1, "smoothing": 0.3}

#: When the checkpoint is written, and after how many batches that is.
MOMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "mid-epoch": ({"every_n_train_steps": 5}, {}, 5),
    "mid-epoch 2": ({"every_n_train_steps": 11}, {}, 11),
    "last batch": ({"every_n_train_steps": 8}, {}, 8),
    "validation": ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, {}, 8),
    "mid-epoch validation": ({"save_on_train_epoch_end": False}, {"val_check_interval": 0.5}, 4),
    "accumulated": ({"every_n_train_steps": 5}, {}, 10),
    "epoch end": ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {}, 8),
    "epoch end without validation": ({"every_n_epochs": 1}, {"limit_val_batches": 0}, 8),
}


def run(
    directory: Path,
    strategy: dict[str, Any] | str,
    module: dict[str, Any],
    saving: dict[str, Any],
    resume_from: str | None,
    epochs: int,
    loader: dict[str, Any] | None = None,
    ema: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(100 + rank)  # dropout differs by rank
    model = Classifier(**module)
    torch.manual_seed(100 + rank)
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.8)] if ema else []
    folder = directory if resume_from is None else directory / "resumed"
    callbacks.append(ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saving))
    chosen = SelSyncStrategy(**strategy) if isinstance(strategy, dict) else strategy
    fitting = trainer(
        chosen,
        int(os.environ["WORLD_SIZE"]),
        directory,
        callbacks=callbacks,
        enable_checkpointing=True,
        max_epochs=epochs,
        **kwargs,
    )
    fitting.fit(model, train_loader(**(loader or {})), val_loader(), ckpt_path=resume_from)
    metrics = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return {"weights": model.weights(), "seen": model.seen, "validated_with": model.validated_with, "metrics": metrics}


def resumed_and_whole(
    tmp_path: Path,
    moment: str,
    settings: dict[str, Any],
    module: dict[str, Any],
    world_size: int = 2,
    step: int | None = None,
    epochs: int = 3,
    **kwargs: Any,
) -> None:
    """Runs some epochs at once, then again from the checkpoint, in new processes."""
    saving, how, batches = MOMENTS[moment]
    arguments = {**how, **kwargs}
    whole = launch(partial(run, tmp_path, settings, module, saving, None, epochs, **arguments), world_size, init=False)
    checkpoint = tmp_path / f"step={step or batches}.ckpt"
    assert checkpoint.exists(), list(tmp_path.iterdir())
    resumed = launch(
        partial(run, tmp_path, settings, module, saving, str(checkpoint), epochs, **arguments), world_size, init=False
    )
    for first, second in zip(whole, resumed, strict=True):
        assert second["seen"] == first["seen"][batches:], "the next unseen batch, and no other"
        assert torch.equal(second["weights"], first["weights"])
        assert second["metrics"]["selsync/lssr"] == first["metrics"]["selsync/lssr"]
        for name in ("loss", "val_loss"):
            assert second["metrics"].get(name) == first["metrics"].get(name)


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != "accumulated"])
def test_a_resumed_run_is_the_uninterrupted_one(moment: str, tmp_path: Path) -> None:
    """Per-rank weights, optimizer state, tracker, BatchNorm, dropout, schedule and the place in the queue."""
    module = {"optimizer": "adamw", "batch_norm": True, "dropout": 0.3, "scheduler": True}
    if moment == "last batch":
        # Lightning does not make good the validation that was due, and its loader would have drawn a random number.
        module["dropout"] = 0.0
    resumed_and_whole(tmp_path, moment, MIXED, module)


@pytest.mark.parametrize(
    "settings",
    [
        {"full_pass": True},
        {"partition": "seldp", "injection": (0.5, 0.5)},
    ],
    ids=str,
)
def test_resume_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    resumed_and_whole(tmp_path, "mid-epoch", {**MIXED, **settings}, {"optimizer": "sgd"})


def test_resume_with_workers_and_accumulation(tmp_path: Path) -> None:
    """Worker processes have fetched ahead of training when the checkpoint is written."""
    resumed_and_whole(
        tmp_path,
        "accumulated",
        MIXED,
        {"optimizer": "sgd"},
        loader={"num_workers": 1, "batch_size": 2},
        step=5,  # of two batches each
        epochs=2,
        accumulate_grad_batches=2,
    )


def test_resume_with_loss_scaling(tmp_path: Path) -> None:
    resumed_and_whole(tmp_path, "mid-epoch", MIXED, {"optimizer": "sgd"}, plugins=[scaling()])


def test_resume_with_ema(tmp_path: Path) -> None:
    resumed_and_whole(tmp_path, "mid-epoch", MIXED, {"optimizer": "sgd", "batch_norm": True}, ema=True)


def test_a_checkpoint_is_a_normal_one(tmp_path: Path) -> None:
    """It loads with weights_only=True, holds the average, and plain DDP goes on from it."""
    module = {"optimizer": "adamw"}
    saving = {"every_n_epochs": 1, "save_on_train_epoch_end": False}
    outcomes = launch(partial(run, tmp_path, {"delta": 1e9}, module, saving, None, 1), 2, init=False)
    path = tmp_path / "step=8.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    average = torch.cat([value.flatten() for value in checkpoint["state_dict"].values()])
    assert torch.equal(average, outcomes[0]["validated_with"][0])
    assert sorted(checkpoint["pipesync"]["ranks"]) == [0, 1]

    continued = launch(partial(run, tmp_path / "ddp", "ddp", module, saving, str(path), 2), 2, init=False)
    assert len(continued[0]["seen"]) == 8
    assert torch.equal(continued[0]["weights"], continued[1]["weights"])


def test_without_replicas_a_checkpoint_is_small(tmp_path: Path) -> None:
    settings = {"delta": 1e9, "checkpoint_replicas": False}
    saving = {"every_n_epochs": 1}
    launch(partial(run, tmp_path, settings, {}, saving, None, 1), 2, init=False)
    path = tmp_path / "step=8.ckpt"
    assert "ranks" not in torch.load(path, weights_only=True)["pipesync"]
    first, second = launch(partial(run, tmp_path, settings, {}, saving, str(path), 2), 2, init=False)
    assert torch.equal(first["weights"], second["weights"])


def resume_wrongly(directory: Path, settings: dict[str, Any], path: str) -> tuple[str, str] | None:
    return raised(lambda: run(directory, settings, {}, {}, path, 2))


def test_what_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    launch(partial(run, tmp_path, MIXED, {}, {"every_n_epochs": 1}, None, 1), 2, init=False)
    path = str(tmp_path / "step=8.ckpt")
    for outcome in launch(resume_wrongly, 3, tmp_path, MIXED, path, init=False):
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert "2 ranks" in outcome[1]
        assert "3" in outcome[1]
    for outcome in launch(resume_wrongly, 2, tmp_path, {**MIXED, "compression": "int8"}, path, init=False):
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert "int8" in outcome[1]


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


def fit_saving(directory: Path, saves: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    model = Saving(saves)
    callbacks = [ModelCheckpoint(directory / "every", save_top_k=-1, every_n_train_steps=1)] if saves else []
    fitting = trainer(
        SelSyncStrategy(**MIXED), 2, directory, callbacks=callbacks, enable_checkpointing=saves, max_epochs=2
    )
    fitting.fit(model, train_loader(), val_loader())
    return model.watched, model.weights()


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Neither what training goes on from, nor what comes to see the weights after the checkpoint was written."""
    without = launch(fit_saving, 2, tmp_path, False, init=False)
    for plain, saving in zip(without, launch(fit_saving, 2, tmp_path, True, init=False), strict=True):
        for before, after in zip(plain[0], saving[0], strict=True):
            assert torch.equal(before, after)
        assert torch.equal(plain[1], saving[1])
    assert (tmp_path / "3.ckpt").exists()


def replicas_in(path: Path) -> list[Tensor]:
    ranks = torch.load(path, weights_only=True)["pipesync"]["ranks"]
    own = [ranks[rank]["method"]["units"][0]["fragments"]["replicas"]["own"] for rank in sorted(ranks)]
    return [torch.cat([value.flatten() for bucket in buckets for value in bucket]) for buckets in own]


def test_a_checkpoint_holds_each_replica(tmp_path: Path) -> None:
    launch(partial(run, tmp_path, {"delta": 1e9}, {}, {"every_n_train_steps": 3}, None, 1), 2, init=False)
    first, second = replicas_in(tmp_path / "step=3.ckpt")
    assert not torch.equal(first, second)
