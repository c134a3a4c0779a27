"""Batches from a work queue in loops with Fabric and Accelerate, whose ranks take different numbers of steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state

SETTINGS: dict[str, Any] = {"policy": "async", "partition": "work_queue", "timeout_s": 60}
SAMPLES, BATCH_SIZE, EPOCHS = 80, 4, 2
#: Batches of 20 that rank 0 has before rank 1, which asks for one more ahead, trains on its second one.
AHEAD = 12


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH_SIZE, shuffle=True)


def take_turns(folder: Path, epoch: int, number: int, rank: int) -> None:
    """Has both get a batch before one trains, and rank 0 more than half of them before rank 1 trains on its second."""

    def mark(rank: int, number: int) -> Path:
        return folder / f"rank {rank} has batch {number} of epoch {epoch}"

    mark(rank, number).touch()
    if number == 0:
        wait_for(mark(1 - rank, 0).exists)
    if number == rank == 1:
        wait_for(mark(0, AHEAD - 1).exists)


def train_with_fabric(folder: Path, loads: bool) -> dict[str, Any]:
    """Trains with Fabric; ``loads``: saves after each epoch, and loads that into what it trains."""
    fabric = Fabric(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=ParameterServerFabricStrategy(**SETTINGS)
    )
    fabric.launch()
    model = seeded_mlp()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model))
    loader, seen = fabric.strategy.prepare_train_loader(data()), []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for number, (indices,) in enumerate(loader):
            seen.append(indices.tolist())
            take_turns(folder, epoch, number, fabric.global_rank)
            optimizer.zero_grad()
            fabric.backward(loss(model, number, fabric.global_rank))
            optimizer.step()
        with fabric.strategy.consolidated():
            weights = {name: value.clone() for name, value in state(model).items()}
        if loads:
            progress = {"model": model, "optimizer": optimizer, "loader": loader}
            fabric.save(folder / "checkpoint", progress)
            fabric.load(folder / "checkpoint", progress)
    fabric.strategy.teardown()  # waits for the other rank
    return {"seen": seen, "weights": weights}


def accelerated(*objects: Any) -> Any:
    accelerator = PipeSyncAccelerator(PipeSyncPlugin("parameter_server", **SETTINGS))
    return accelerator, *accelerator.prepare(*objects)


def train_with_accelerate(folder: Path) -> dict[str, Any]:
    """Trains with Accelerate, saves between two epochs, and trains on from what was saved."""
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        model = seeded_mlp()
        accelerator, model, optimizer = accelerated(model, OPTIMIZERS["sgd"](model))
        rank = accelerator.process_index
        loader = accelerator.prepare_train_loader(data())
        if epoch:
            accelerator.load_state(str(folder))
        loader.set_epoch(epoch)
        for number, (indices,) in enumerate(loader):
            seen.append(indices.tolist())
            take_turns(folder, epoch, number, rank)
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, number, rank))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(str(folder))
        weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
        accelerator.free_memory()
    accelerator.end_training()
    return {"seen": seen, "weights": weights}


@pytest.mark.parametrize("framework", ["fabric", "fabric that loads", "accelerate"])
def test_each_rank_takes_its_next_batch_from_the_queue(framework: str, tmp_path: Path) -> None:
    if framework != "accelerate":
        fast, slow = on_ranks(train_with_fabric, 2, tmp_path, framework != "fabric", init=False)
    else:
        fast, slow = on_ranks(train_with_accelerate, 2, tmp_path, init=False)
    everything = sorted(index for outcome in (fast, slow) for batch in outcome["seen"] for index in batch)
    assert everything == sorted([*range(SAMPLES)] * EPOCHS)
    assert len(fast["seen"]) > len(slow["seen"]) > 0
    assert len({tuple(batch) for outcome in (fast, slow) for batch in outcome["seen"]}) == EPOCHS * SAMPLES / BATCH_SIZE
    for name, value in fast["weights"].items():
        assert torch.equal(value, slow["weights"][name]), name


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def prepare_wrongly() -> list[Any]:
    """Prepares loaders that have no place in a queue, or before the model, and trains on one that was not prepared."""
    drawn = DataLoader(range(SAMPLES), sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    accelerator = PipeSyncAccelerator(PipeSyncPlugin("parameter_server", **SETTINGS))
    early = raised(lambda: accelerator.prepare_train_loader(data()))
    model = seeded_mlp()
    accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    refused = [raised(lambda one=one: accelerator.prepare_train_loader(one)) for one in (drawn, DataLoader(Numbers()))]
    accelerator.free_memory()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ParameterServerFabricStrategy(**SETTINGS))
    fabric.launch()
    model = seeded_mlp()
    model, optimizer = fabric.setup(model, OPTIMIZERS["sgd"](model))
    prepare = fabric.strategy.prepare_train_loader
    refused += [raised(lambda one=one: prepare(one)) for one in (drawn, DataLoader(Numbers()))]
    for _ in fabric.setup_dataloaders(data()):
        fabric.backward(loss(model, 0, fabric.global_rank))
        outcomes = [early, raised(optimizer.step), *refused]
        fabric.strategy.teardown()
        return outcomes
    return []


def test_loaders_that_nobody_hands_out_are_refused() -> None:
    for early, unknown, *refused in on_ranks(prepare_wrongly, 2, init=False):
        assert "prepare(model, optimizer) before prepare_train_loader()" in early[1]
        assert "partition='work_queue' has no effect" in unknown[1]
        for one, named in zip(refused, ["range with a WeightedRandomSampler", "Numbers with a "] * 2, strict=True):
            assert_refused({f"this loader has {named}": one})
