"""Fits with each strategy, one after the other, on the processes that a launcher has started: ``torchrun THIS FOLDER``.

Every rank leaves what it found in ``FOLDER/RANK.pt``.
"""

from __future__ import annotations

import os
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


class Watch(pl.Callback):
    """Keeps which samples this rank's loader gives, and the rows of a torus."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.row: list[int] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self.samples += batch[0].tolist()
        torus = trainer.strategy.method.transport.topology
        self.row = torus.row_of(trainer.global_rank) if isinstance(torus, Torus) else None


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
        run = launched_trainer(
            make_strategy(STRATEGIES[name]),
            folder,
            max_steps=steps,
            num_sanity_val_steps=2,
            callbacks=[ModelCheckpoint(kept, save_last=True, every_n_train_steps=2)],
            enable_checkpointing=True,
        )
        outcome = raised(lambda run=run: run.fit(Classifier(), train_loader(), val_loader(), ckpt_path="last"))
        if steps == 2:
            assert outcome is None, outcome
    return outcome


def main(folder: Path) -> None:
    found = {name: fit(name, folder) for name in STRATEGIES}
    refused = {name: resume(name, folder) for name in RESUMED}
    torch.save({"found": found, "refused": refused}, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
