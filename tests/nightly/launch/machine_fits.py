"""Fits on the processes that a launcher has started: ``torchrun THIS each|elastic FOLDER``.

With ``each`` they fit with each strategy, one after the other. With ``elastic`` they fit once; in the first attempt
rank 1 is killed, and in the next one the training goes on from its checkpoint. Every rank leaves what it found in
``FOLDER/RANK.pt``.
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

from lightning_pipesync.core.comm.torus import Torus
from tests.support.harness import raised
from tests.support.lightning_models import Classifier, launched_trainer, make_strategy, train_loader, val_loader

EPOCHS = 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "dear": {"name": "dear", "topology": "torus2d"},
    "selsync": {"name": "selsync", "delta": 0.1},
    "pipe_sgd": {"name": "pipe_sgd"},
    "local_sgd": {"name": "local_sgd", "period": 3, "neighbors": "random_pairs"},
    "parameter_server": {"name": "parameter_server"},
    "ea_pipe": {"name": "ea_pipe"},
}
#: Those whose refusal of unequal checkpoints is tried: there are two ways to set up a strategy.
RESUMED = ("dear", "ea_pipe")
#: Of the elastic one, whose ranks have a state of their own each.
SAVE_EVERY, DIE_AFTER, STEPS = 4, 6, 12


class Watch(pl.Callback):
    """Keeps where the training begins, which samples this rank's loader gives, and the rows of a torus."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.row: list[int] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.samples += batch[0].tolist()
        torus = trainer.strategy.method.transport.topology
        self.row = torus.row_of(trainer.global_rank) if isinstance(torus, Torus) else None


class Kill(pl.Callback):
    """Kills this process, if it is rank 1, after a step, once."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == DIE_AFTER and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(name: str, folder: Path) -> dict[str, Any]:
    """Returns what this rank saw of a training with the strategy of that name."""
    model, watch = Classifier(), Watch()
    initial = model.weights()
    run = launched_trainer(make_strategy(STRATEGIES[name]), folder, max_epochs=EPOCHS, callbacks=[watch])
    run.fit(model, train_loader(), val_loader())
    place = {"rank": run.global_rank, "local": run.local_rank, "machine": run.node_rank, "world": run.world_size}
    weights = {"initial": initial, "weights": model.weights()}
    return {"place": place, "samples": watch.samples, "row": watch.row, **weights}


def resume(name: str, folder: Path) -> tuple[str, str] | None:
    """Returns what is raised if the machines do not see the same checkpoints."""
    kept = folder / f"{name} on machine {os.environ['GROUP_RANK']}"
    for steps in (2, 4):
        saving = ModelCheckpoint(kept, save_last=True, every_n_train_steps=2)
        settings: dict[str, Any] = {"max_steps": steps, "callbacks": [saving], "enable_checkpointing": True}
        run = launched_trainer(make_strategy(STRATEGIES[name]), folder, num_sanity_val_steps=2, **settings)
        outcome = raised(lambda run=run: run.fit(Classifier(), train_loader(), val_loader(), ckpt_path="last"))
        if steps == 2:
            assert outcome is None, outcome
    return outcome


def fit_elastic(folder: Path, *callbacks: pl.Callback) -> dict[str, Any]:
    """Fits, from the last checkpoint in ``folder`` if there is one; returns where it began and the weights."""
    pl.seed_everything(0, verbose=False)
    model, watch = Classifier("adamw", dropout=0.3, scheduler=True), Watch()
    saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=SAVE_EVERY)
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": STEPS, "enable_checkpointing": True}
    strategy = make_strategy(STRATEGIES["selsync"])
    run = launched_trainer(strategy, folder, callbacks=[watch, saving, *callbacks], **settings)
    run.fit(model, train_loader(), val_loader(), ckpt_path="last")
    return {"began": watch.began, "ended": run.global_step, "weights": model.weights()}


def main(what: str, folder: Path) -> None:
    found: dict[str, Any]
    if what == "each":
        found = {name: fit(name, folder) for name in STRATEGIES}
        found["refused"] = {name: resume(name, folder) for name in RESUMED}
    else:
        found = {"interrupted": fit_elastic(folder / "interrupted", Kill(folder / "killed"))}
        found["whole"] = fit_elastic(folder / "whole")
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
