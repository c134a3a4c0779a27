"""Batches from a work queue in loops with Fabric and Accelerate, whose ranks take different numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.fabric import ParameterServerFabricStrategy
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state

SETTINGS: dict[str, Any] = {"policy": "async", "partition": "work_queue", "timeout_s": 60}
SAMPLES, BATCH_SIZE, EPOCHS = 80, 4, 2
#: Batches of 20 that rank 0 has before rank 1, which asks for one more ahead, trains on its second one.
AHEAD = 12


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH_SIZE, shuffle=True)


def take_turns(folder: Path, rank: int, epoch: int, number: int) -> None:
    """Has both get a batch before one trains, and rank 0 more than half of them before rank 1 trains on its second."""
    (folder / f"{rank} {epoch} {number}").touch()
    if number == 0:
        wait_for((folder / f"{1 - rank} {epoch} 0").exists)
    if number == rank == 1:
        wait_for((folder / f"0 {epoch} {AHEAD - 1}").exists)


def fabric() -> Any:
    """Returns Fabric, launched, a model and its optimizer."""
    launched = Fabric(accelerator="cpu", devices=2, strategy=ParameterServerFabricStrategy(**SETTINGS))
    launched.launch()
    model = seeded_mlp()
    return launched, *launched.setup(model, OPTIMIZERS["sgd"](model))


def accelerated() -> Any:
    """Returns an Accelerator, a model and its optimizer."""
    accelerator, model = PipeSyncAccelerator(PipeSyncPlugin("parameter_server", **SETTINGS)), seeded_mlp()
    return accelerator, *accelerator.prepare(model, OPTIMIZERS["sgd"](model))


def train_with_fabric(folder: Path, loads: bool) -> dict[str, Any]:
    """Trains with Fabric; ``loads``: saves after each epoch, and loads that into what it trains."""
    launched, model, optimizer = fabric()
    rank = launched.global_rank
    loader, seen = launched.strategy.prepare_train_loader(data()), []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for number, (indices,) in enumerate(loader):
            seen.append(indices.tolist())
            take_turns(folder, rank, epoch, number)
            optimizer.zero_grad()
            launched.backward(loss(model, number, rank))
            optimizer.step()
        with launched.strategy.consolidated():
            weights = state(model)
        if loads:
            progress = {"model": model, "optimizer": optimizer, "loader": loader}
            launched.save(folder / "checkpoint", progress)
            launched.load(folder / "checkpoint", progress)
    launched.strategy.teardown()  # waits for the other rank
    return {"seen": seen, "weights": weights}


def train_with_accelerate(folder: Path) -> dict[str, Any]:
    """Trains with Accelerate, saves between two epochs, and trains on from what was saved."""
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        accelerator, model, optimizer = accelerated()
        rank, loader = accelerator.process_index, accelerator.prepare_train_loader(data())
        if epoch:
            accelerator.load_state(str(folder))
        loader.set_epoch(epoch)
        for number, (indices,) in enumerate(loader):
            seen.append(indices.tolist())
            take_turns(folder, rank, epoch, number)
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, number, rank))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder))
        weights = state(accelerator.unwrap_model(model))
        accelerator.free_memory()
    accelerator.end_training()
    return {"seen": seen, "weights": weights}


@pytest.mark.parametrize("framework", ["fabric", "fabric that loads", "accelerate"])
def test_each_rank_takes_its_next_batch_from_the_queue(framework: str, tmp_path: Path) -> None:
    train = (
        train_with_accelerate if framework == "accelerate" else partial(train_with_fabric, loads="loads" in framework)
    )
    fast, slow = on_ranks(train, 2, tmp_path, init=False)
    batches = [batch for outcome in (fast, slow) for batch in outcome["seen"]]
    assert sorted(index for batch in batches for index in batch) == sorted([*range(SAMPLES)] * EPOCHS)
    assert len(fast["seen"]) > len(slow["seen"]) > 0
    assert len(set(map(tuple, batches))) == EPOCHS * SAMPLES / BATCH_SIZE
    assert_same(fast["weights"], slow["weights"])


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def prepare_wrongly() -> list[Any]:
    """Prepares loaders that have no place in a queue, or before the model, and trains on one that was not prepared."""
    drawn = DataLoader(range(SAMPLES), sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))  # type: ignore[arg-type]
    new = PipeSyncAccelerator(PipeSyncPlugin("parameter_server", **SETTINGS))
    early = raised(lambda: new.prepare_train_loader(data()))
    accelerator, *_ = accelerated()
    refused = [raised(lambda one=one: accelerator.prepare_train_loader(one)) for one in (drawn, DataLoader(Numbers()))]
    accelerator.free_memory()
    launched, model, optimizer = fabric()
    prepare = launched.strategy.prepare_train_loader
    refused += [raised(lambda one=one: prepare(one)) for one in (drawn, DataLoader(Numbers()))]
    next(iter(launched.setup_dataloaders(data())))
    launched.backward(loss(model, 0, launched.global_rank))
    outcomes = [early, raised(optimizer.step), *refused]
    launched.strategy.teardown()
    return outcomes


def test_loaders_that_nobody_hands_out_are_refused() -> None:
    for early, unknown, *refused in on_ranks(prepare_wrongly, 2, init=False):
        assert "prepare(model, optimizer) before prepare_train_loader()" in early[1]
        assert "partition='work_queue' has no effect" in unknown[1]
        for one, named in zip(refused, ["range with a WeightedRandomSampler", "Numbers with a "] * 2, strict=True):
            assert_refused({f"this loader has {named}": one})
