"""Fits with several strategies under a launcher that starts failed processes again: ``elastic.sh THIS FOLDER``.

In each attempt, rank 1 is killed in the training with the next of the strategies, and that goes on in the attempt after
it. At the end all train without faults. Every rank leaves what it found in ``FOLDER/NAME.RANK.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.lightning_models import Classifier, launched_trainer, make_strategy, train_loader, val_loader

#: Each rank has a state of its own.
STRATEGIES: dict[str, dict[str, Any]] = {"selsync": {"delta": 0.1}}
SAVE_EVERY, DIE_AFTER, STEPS = 4, 6, 12


class Kill(pl.Callback):
    """Kills this process, if it is rank 1, after a step, and leaves a note that it did."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == DIE_AFTER:
            self.note.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


class Begin(pl.Callback):
    """Keeps the step at which the training begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


def fit(name: str, folder: Path, faults: list[pl.Callback]) -> dict[str, Any]:
    """Fits, from the last checkpoint in ``folder`` if there is one; returns where it began and the weights."""
    pl.seed_everything(0, verbose=False)
    model, begin = Classifier("adamw", dropout=0.3, scheduler=True), Begin()
    saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=SAVE_EVERY)
    run = launched_trainer(
        make_strategy({"name": name, **STRATEGIES[name]}),
        folder,
        max_epochs=-1,
        max_steps=STEPS,
        callbacks=[begin, saving, *faults],
        enable_checkpointing=True,
    )
    run.fit(model, train_loader(), val_loader(), ckpt_path="last")
    return {"began": begin.step, "ended": run.global_step, "weights": model.weights()}


def main(folder: Path) -> None:
    for name in STRATEGIES:
        found = folder / f"{name}.{os.environ['RANK']}.pt"
        if not found.exists():  # otherwise it was complete before another one's fault
            note = folder / f"{name} was killed"
            torch.save(fit(name, folder / name, [] if note.exists() else [Kill(note)]), found)
    for name in STRATEGIES:
        torch.save(fit(name, folder / f"{name} whole", []), folder / f"{name} whole.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
