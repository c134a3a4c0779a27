"""Weights of one rank that changed by themselves: no checkpoint is written, but one after an error, which says so."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_pipesync.lightning.sync import RIGHT_OR_WRONG
from tests.quick.methods.test_held_weights import STRUCK, flip
from tests.support.case_table import launch_cases
from tests.support.harness import raised
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer, val_loader


class Flips(pl.Callback):
    """After the third step, a bit of a weight of one rank changes."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == STRUCK:
            trainer.strategy.method.synchronize()
            flip(next(module.parameters()))


def fit(directory: Path) -> dict[str, Any]:
    saves = ModelCheckpoint(directory / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    strategy = make_strategy({"name": "dear", "timeout_s": 60})
    callbacks = [Flips(), saves, OnExceptionCheckpoint(directory / "after", "error")]
    run = trainer(strategy, int(os.environ["WORLD_SIZE"]), directory, callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = raised(lambda: run.fit(Classifier(), train_loader(), val_loader()))
    return {
        "outcome": outcome,
        "said": [str(one.message) for one in said if "after an error" in str(one.message)],
        "saved": sorted(path.name for path in (directory / "saved").glob("*.ckpt")),
    }


def test_no_checkpoint_is_written(tmp_path: Path) -> None:
    outcomes = launch_cases({"fit": partial(fit, tmp_path)}, 3, init=False)["fit"]
    assert any(RIGHT_OR_WRONG in text for text in outcomes[0]["said"]), outcomes[0]["said"]
    for outcome in outcomes:
        kind, message = outcome["outcome"]
        assert kind == "DifferentWeightsError"
        assert message.splitlines()[-1].startswith(f"Rank {STRUCK} (host "), message
        assert outcome["saved"] == ["step=2.ckpt"]
