"""A replica that comes to others in a plain loop: what it gets besides weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from tests.models import OPTIMIZERS, loss, seeded_mlp
from tests.reference_elastic_data import Data, seen
from tests.replica_jobs import TIMEOUT_S, launch_replicas, wait_for

PERIOD, EPOCHS, MEETS = 2, 2, 5
DATA = Data(60, 4)


def train(rank: int, directory: Path) -> list[tuple[int, list[int], float]]:
    """Returns by step the epoch, the batch and the learning rate, which decays in each step that ends a round."""
    if rank == 1:
        wait_for(directory / "going on")
    model = seeded_mlp(rank)
    optimizer = OPTIMIZERS["sgd"](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, PERIOD, 0.75)
    sync = LocalSGD(model, optimizer, period=PERIOD, partition="defdp", timeout_s=TIMEOUT_S)
    sync.hand_over(scheduler=scheduler)
    if rank == 1:
        (directory / "alive").touch()  # so the others wait for it in their next round
    loader = sync.prepare_train_loader(DataLoader(range(DATA.size), DATA.batch_size, shuffle=True), seed=7)  # type: ignore[arg-type]
    steps = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            if rank == 0 and len(steps) == MEETS:
                (directory / "going on").touch()
                wait_for(directory / "alive")
            steps.append((epoch, batch.tolist(), optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            loss(model, len(steps), rank).backward()
            sync.step()
            scheduler.step()
    sync.end()
    sync.detach()
    return steps


def test_it_has_the_others_place_in_the_data_and_their_learning_rate(tmp_path: Path) -> None:
    of_0, of_1 = launch_replicas(train, 2, tmp_path, num_replicas=1)
    came = len(of_0) - len(of_1)
    assert came > MEETS
    expected = seen(DATA, {0: "0", came: "01"}, EPOCHS)
    for number, steps in (("0", of_0), ("1", of_1)):
        assert [(epoch, batch) for epoch, batch, _ in steps] == expected[number]
    assert [rate for *_, rate in of_1] == [rate for *_, rate in of_0[came:]]
