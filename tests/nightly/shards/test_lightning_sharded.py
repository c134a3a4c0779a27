"""Modules that shard themselves in ``configure_model``, under a Trainer: what a plain loop trains."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.nightly.shards.test_sharded_replicas import (
    CASES,
    REPLICAS,
    SETTINGS,
    SHARDS,
    STEPS,
    adamw,
    batch,
    device_mesh,
    model,
    sharded,
    train,
    whole,
)
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import make_strategy, trainer

NAMES = ("dear", "pipe_sgd", "selsync", "diloco")
SAVED_AT, BATCH = 4, 8


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The rows of the ranks' batches, as ``DistributedSampler`` divides them: the first of each rank, the second..."""

    def __len__(self) -> int:
        return REPLICAS * SHARDS * STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place, rank = divmod(index, REPLICAS * SHARDS)
        inputs, targets = batch(rank, place // BATCH)
        return inputs[place % BATCH], targets[place % BATCH]


class Sharding(pl.LightningModule):
    """The model, in whose ``configure_model`` FSDP2 shards it: by the strategy's mesh, or by one of its own."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            mesh = device_mesh()["shards"] if self.device_mesh is None else self.device_mesh["data_parallel"]
            self.layers = sharded(mesh)

    def training_step(self, data: tuple[Tensor, Tensor], _: int) -> Tensor:
        return (self.layers(data[0]) - data[1]).square().mean()

    def validation_step(self, data: tuple[Tensor, Tensor], _: int) -> None:
        self.log("loss", self.training_step(data, 0), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return adamw(self)


def fit(
    name: str, folder: Path, checkpoint: Path | None = None, ranks_per_replica: int = 1, **settings: Any
) -> Sharding:
    method, of_method = SETTINGS[name]
    if method == "selsync":
        of_method = {**of_method, "partition": "defdp"}
    strategy = make_strategy({"name": method, "timeout_s": 60, "ranks_per_replica": ranks_per_replica, **of_method})
    order = DistributedSampler(Rows(), REPLICAS * SHARDS, int(os.environ["RANK"]), shuffle=False)
    module, loader = Sharding(), DataLoader(Rows(), batch_size=BATCH, sampler=order)
    run = trainer(strategy, REPLICAS * SHARDS, folder, max_epochs=1, **settings)
    run.fit(module, loader, loader, ckpt_path=checkpoint)
    run.save_checkpoint(folder / "end.ckpt")
    return module


def fit_and_resume(name: str, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """The module has a mesh of its own, and, where it resumes, that of the strategy."""
    folder = folder / name
    saves = ModelCheckpoint(folder, "saved", every_n_train_steps=SAVED_AT)
    uninterrupted = whole(fit(name, folder / "whole", callbacks=[saves], enable_checkpointing=True))
    return uninterrupted, whole(fit(name, folder / "rest", folder / "saved.ckpt", ranks_per_replica=SHARDS))


def fit_clipped(name: str, folder: Path) -> list[Tensor]:
    return whole(fit(name, folder / f"{name} clipped", ranks_per_replica=SHARDS, gradient_clip_val=0.1))


@pytest.fixture(scope="module")
def in_plain_loops() -> Outcomes:
    cases = {name: partial(train, **CASES[name]) for name in (*NAMES, *(f"{name}, clipped" for name in NAMES[:3]))}
    return launch_cases(cases, REPLICAS * SHARDS)


@pytest.fixture(scope="module")
def in_trainers(folder: Path) -> Outcomes:
    cases: dict[str, Any] = {name: partial(fit_and_resume, name, folder) for name in NAMES}
    cases |= {f"{name}, clipped": partial(fit_clipped, name, folder) for name in NAMES[:3]}
    return launch_cases(cases, REPLICAS * SHARDS, init=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_trains_what_a_plain_loop_does_and_resumes(
    name: str, in_plain_loops: Outcomes, in_trainers: Outcomes
) -> None:
    for expected, (uninterrupted, resumed) in zip(in_plain_loops[name], in_trainers[name], strict=True):
        assert all(map(torch.equal, uninterrupted, expected))
        assert all(map(torch.equal, resumed, expected))


@pytest.mark.parametrize("name", NAMES[:3])
def test_clipping_is_by_the_norm_of_the_whole_gradient(
    name: str, in_plain_loops: Outcomes, in_trainers: Outcomes
) -> None:
    for expected, found in zip(in_plain_loops[f"{name}, clipped"], in_trainers[f"{name}, clipped"], strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_that_of_a_whole_model(name: str, in_trainers: Outcomes, folder: Path) -> None:
    [(uninterrupted, _), *_] = in_trainers[name]
    checkpoint = torch.load(folder / name / "whole" / "end.ckpt", weights_only=True)
    alone = model()
    alone.load_state_dict({key.removeprefix("layers."): value for key, value in checkpoint["state_dict"].items()})
    assert all(map(torch.equal, alone.parameters(), uninterrupted))
    optimizer = adamw(alone)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    [(first, state), *_] = optimizer.state.items()
    assert isinstance(first, nn.Parameter)
    assert state["exp_avg"].shape == first.shape
    assert state["exp_avg"].any()
