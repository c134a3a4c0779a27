"""A replica that comes to others in a plain loop, in Fabric's or in Accelerate's: what it gets besides weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD, PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.fabric import LocalSGDFabricStrategy
from tests.references.elastic_data import Data, seen
from tests.support.models import OPTIMIZERS, loss, seeded_mlp
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas, wait_for

PERIOD, EPOCHS, MEETS = 2, 2, 5
DATA = Data(60, 4)


def train(rank: int, directory: Path, loop: str) -> list[tuple[int, list[int], float]]:
    """Returns by step the epoch, the batch and the learning rate, which decays in each step that ends a round."""
    if rank == 1:
        wait_for(directory / "going on")
    model: Any = seeded_mlp(rank)
    optimizer: Any = OPTIMIZERS["sgd"](model)
    sync: Any
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, PERIOD, 0.75)
    settings: dict[str, Any] = {"period": PERIOD, "partition": "defdp", "timeout_s": TIMEOUT_S}
    if loop == "Fabric":
        fabric = Fabric(accelerator="cpu", devices=1, strategy=LocalSGDFabricStrategy(**settings))
        fabric.launch()
        fabric.seed_everything(7, verbose=False)
        model, optimizer = fabric.setup(model, optimizer)
        sync, prepare, step = fabric.strategy.method_of(), fabric.strategy.prepare_train_loader, optimizer.step
    elif loop == "Accelerate":
        plugin = PipeSyncPlugin("local_sgd", **settings)
        sync = PipeSyncAccelerator(plugin, dataloader_config=DataLoaderConfiguration(data_seed=7))
        model, optimizer, scheduler = sync.prepare(model, optimizer, scheduler)  # which hands it over
        prepare, step = sync.prepare_train_loader, optimizer.step
    else:
        sync = LocalSGD(model, optimizer, **settings)
        prepare, step = partial(sync.prepare_train_loader, seed=7), sync.step
    if loop != "Accelerate":
        sync.hand_over(scheduler=scheduler)
    if rank == 1:
        (directory / "alive").touch()  # so the others wait for it in their next round
    loader = prepare(DataLoader(range(DATA.size), DATA.batch_size, shuffle=True))
    steps = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            if rank == 0 and len(steps) == MEETS:
                (directory / "going on").touch()
                wait_for(directory / "alive")
            steps.append((epoch, batch.tolist(), optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            loss(model, len(steps), rank).backward()
            step()
            scheduler.step()
    sync.end()
    if loop != "Accelerate":  # it detaches at the end of the process
        sync.detach()
    return steps


@pytest.mark.parametrize("loop", ["a plain loop", "Fabric", "Accelerate"])
def test_it_has_the_others_place_in_the_data_and_their_learning_rate(loop: str, tmp_path: Path) -> None:
    of_0, of_1 = launch_replicas(train, 2, tmp_path, loop, num_replicas=1)
    came = len(of_0) - len(of_1)
    assert came > MEETS
    expected = seen(DATA, {0: "0", came: "01"}, EPOCHS)
    for number, steps in (("0", of_0), ("1", of_1)):
        assert [(epoch, batch) for epoch, batch, _ in steps] == expected[number]
    assert [rate for *_, rate in of_1] == [rate for *_, rate in of_0[came:]]
