"""Checkpoints that a former version has written in a Trainer, before its methods had engines in common, resume."""

from __future__ import annotations

import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.case_table import Outcomes, launch_cases
from tests.lightning_models import make_strategy, train_loader, trainer

#: ``NAME.ckpt`` of each method, after six steps of :func:`train` on two ranks.
FILE = Path(__file__).parent / "former_checkpoints.tar.xz"
#: A method of each engine, with a state that a plain checkpoint lacks: gradients in flight, replicas, residuals.
METHODS: dict[str, dict[str, Any]] = {
    "pipe_sgd": {"staleness": 2},
    "local_sgd": {"period": 4, "outer_optimizer": "nesterov", "compression": "int8"},
    "parameter_server": {"policy": "sync", "compression": "int8"},
    "ea_pipe": {"split": (1,)},
}
SAVED_AT, STEPS = 6, 16


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        self.seen: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return nn.functional.cross_entropy(self.layers(batch[1]), batch[2])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(folder: Path, name: str, path: Path | None = None, steps: int = STEPS) -> tuple[Tensor, list[list[int]]]:
    """Returns the weights and the samples of each batch; a checkpoint is saved if the training ends at once."""
    module, saver = Small(), ModelCheckpoint(folder, filename=name, every_n_train_steps=SAVED_AT)
    run = trainer(
        make_strategy({"name": name, **METHODS[name]}),
        2,
        folder,
        max_steps=steps,
        callbacks=[saver] if steps == SAVED_AT else [],
        enable_checkpointing=steps == SAVED_AT,
    )
    run.fit(module, train_loader(), ckpt_path=path)
    return nn.utils.parameters_to_vector(module.parameters()).detach(), module.seen


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    """By method, without and with the checkpoint."""
    cases: dict[Any, Any] = {}
    with tarfile.open(FILE) as archive:
        for name in METHODS:
            (folder / f"{name}.ckpt").write_bytes(archive.extractfile(f"{name}.ckpt").read())
    for name in METHODS:
        cases[name, "whole"] = partial(train, folder, name)
        cases[name, "resumed"] = partial(train, folder, name, folder / f"{name}.ckpt")
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("name", METHODS)
def test_a_former_checkpoint_resumes(name: str, trained: Outcomes) -> None:
    """Where the uninterrupted run of this version is, but for what another processor rounds."""
    for (whole, seen), (resumed, seen_again) in zip(trained[name, "whole"], trained[name, "resumed"], strict=True):
        assert seen_again == seen[SAVED_AT:]
        torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=1e-5)
