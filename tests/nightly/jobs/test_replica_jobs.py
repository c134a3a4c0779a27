"""Replicas that are jobs of their own, in plain loops and Fabric's: bit for bit the replicas of one job."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.fabric import LocalSGDFabricStrategy
from tests.references.elastic_data import Data, seen
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import TIMEOUT_S, WAITS, launch_replicas, wait_for

STEPS, PERIOD, SAVED = 11, 3, 7
NESTEROV: dict[str, Any] = {"outer_optimizer": "nesterov"}
#: Settings with which the weights are those of one job: of those the agreed ones, if a flush averages them there.
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvg": {"average_optimizer_states": True},
    "int4": {**NESTEROV, "compression": "int4"},
    "int2": {**NESTEROV, "compression": "int2", "residual_decay": 0.9},
    "SparseLoCo": {"outer_optimizer": "sgd", "outer_lr": 0.8, "compression": "chunked_topk"},
    "EASGD": {"outer_optimizer": "elastic"},
    "streaming": {**NESTEROV, "overlap_steps": 1, "fragments": 2},
    "a share": {"participation": 0.5},
}
FLUSHED = ("FedAvg", "int4", "int2", "SparseLoCo")


def begin(
    rank: int, *, load: dict[str, Any] | None = None, batch_norm: bool = True, **settings: Any
) -> tuple[Any, Any, LocalSGD]:
    """Returns a model, its optimizer, and the method, which has joined the others."""
    model = seeded_mlp(rank, batch_norm=batch_norm)
    if load is not None:
        model.load_state_dict(load["model"])
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, **{"period": PERIOD, "timeout_s": TIMEOUT_S, **settings})
    if load is not None:
        sync.load_state_dict(load["method"])
    sync.join()
    return model, optimizer, sync


def step(model: Any, optimizer: Any, sync: LocalSGD, rank: int) -> None:
    optimizer.zero_grad()
    loss(model, sync.num_steps, rank).backward()
    sync.step()


def train(rank: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Any]:
    """Returns a replica's own weights, the agreed ones after a round, those at the end, and its data."""
    model, optimizer, sync = begin(rank, **settings)
    loader = sync.prepare_train_loader(DataLoader(range(2 * STEPS), shuffle=True), seed=1)
    samples = [int(sample) for sample, _ in zip(loader, range(STEPS), strict=False)]
    for number in range(STEPS):
        if number == 2 * PERIOD:
            sync.flush()
            agreed = state(model)
            sync.resume()
        step(model, optimizer, sync, rank)
    own = state(model)
    sync.end()
    last = state(model)
    sync.detach()
    return own, agreed, last, samples


def train_in_one_job(settings: dict[str, Any]) -> Any:
    return train(dist.get_rank(), settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_members_are_the_replicas_of_one_job(name: str) -> None:
    of_jobs, of_ranks = launch_replicas(train, 2, SETTINGS[name]), on_ranks(train_in_one_job, 2, SETTINGS[name])
    for one, other in zip(of_jobs, of_ranks, strict=True):
        assert_same(one[0], other[0], name)
        assert_same(one[2], other[2], name)
        assert one[3] == other[3]
    assert_same(of_jobs[0][1], of_jobs[1][1], name)
    if name in FLUSHED:
        assert_same(of_jobs[0][1], of_ranks[0][1], name)


def end_early(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], bool]:
    """Trains on data of its own, replica 0 for a step less; returns the weights of a round, its own, and the last."""
    model, optimizer, sync = begin(rank, batch_norm=False)
    for number in range(PERIOD + 1 + (rank > 0)):
        step(model, optimizer, sync, rank)
        if number == PERIOD - 1:
            agreed = state(model)
    own = state(model)
    sync.flush()
    sync.end()
    last = state(model)
    sync.end()  # changes nothing
    is_same = all(torch.equal(last[name], value) for name, value in state(model).items())
    sync.detach()
    return agreed, own, last, is_same


def test_replicas_that_end_after_different_numbers_of_steps() -> None:
    """Those with the most steps have a last average; the weights of another one are those of the last round."""
    early, *longest = launch_replicas(end_early, 3)
    assert_same(early[2], early[0])
    for agreed, own, last, _ in longest:
        assert_same(agreed, early[0])
        for name, value in last.items():
            torch.testing.assert_close(value, (longest[0][1][name] + longest[1][1][name]) / 2)
            assert not torch.equal(value, own[name])
    assert_same(longest[0][2], longest[1][2])
    assert all(is_same for *_, is_same in (early, *longest))


def go_on_without_resume(rank: int) -> list[dict[str, Tensor]]:
    """Flushes while an average is under way; returns the weights when it started, then, and once it has arrived.

    The last ones are what the step moves the weights by in which it arrives.
    """
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = LocalSGD(model, optimizer, period=PERIOD, overlap_steps=2, timeout_s=TIMEOUT_S)
    sync.join()
    found = []
    for number in range(PERIOD + 2):
        if number >= PERIOD:
            found.append(state(model))
        if number == PERIOD + 1:
            sync.flush()
        step(model, optimizer, sync, rank)
    movement = {name: -0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    found += [state(model), movement]
    sync.end()
    sync.detach()
    return found


def test_a_replica_keeps_its_movement_after_a_flush_that_is_not_undone() -> None:
    outcomes = launch_replicas(go_on_without_resume, 2)
    for started, flushed, arrived, movement in outcomes:
        for name, moved in movement.items():
            average = (outcomes[0][0][name] + outcomes[1][0][name]) / 2
            torch.testing.assert_close(arrived[name], average + (flushed[name] - started[name]) + moved)


def resume(rank: int) -> tuple[tuple[Any, ...], tuple[str, str] | None]:
    """Trains on from checkpoints that all have, within a round, and from one that the last replica has; of DiLoCo.

    Then loads its part of the outer state in a job without others.
    """
    saved: dict[str, Any] = {}
    outcomes = []
    for name in ("whole", "resumed", "the last has a checkpoint"):
        loads = name == "resumed" or (name != "whole" and rank == 2)
        model, optimizer, sync = begin(rank, load=saved if loads else None, **NESTEROV)
        first = sync.num_steps
        while sync.num_steps < STEPS:
            if sync.num_steps == SAVED and name == "whole":
                sync.flush()
                saved = copy.deepcopy({"model": model.state_dict(), "method": sync.state_dict()})
                sync.resume()
            step(model, optimizer, sync, rank)
        sync.end()
        sync.detach()
        outcomes.append((first, state(model)))
    for variable in ("PIPESYNC_LIGHTHOUSE", "PIPESYNC_NUM_REPLICAS"):
        del os.environ[variable]
    model = seeded_mlp(batch_norm=True)
    alone = LocalSGD(model, OPTIMIZERS["sgd"](model), period=PERIOD, **NESTEROV)
    refused = raised(lambda: alone.load_state_dict(saved["method"]))
    alone.detach()
    return tuple(outcomes), refused


def test_replicas_resume_from_the_same_step_bit_for_bit() -> None:
    """Each with its own weights and states. If one alone has a checkpoint, all begin with it."""
    found = launch_replicas(resume, 3)
    for rank, (((_, whole), (first, resumed), (last, of_last)), refused) in enumerate(found):
        assert first == last == SAVED
        assert_same(resumed, whole)
        assert_same(of_last, found[0][0][2][1])
        assert_raised(refused, "ValueError", f"of rank {rank} of 3, and there are 1", "lighthouse")


def train_in_fabric(rank: int, size: int, directory: Path) -> list[tuple[int, list[int], float]]:
    """Returns by step the epoch, the batch and the learning rate, which decays with steps, and between epochs."""
    if rank == 1:
        wait_for(directory / "going on")
    strategy = LocalSGDFabricStrategy(period=2, partition="defdp", timeout_s=TIMEOUT_S)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    network = seeded_mlp(rank)
    model, optimizer = fabric.setup(network, OPTIMIZERS["sgd"](network))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.75)
    sync = strategy.method_of()
    sync.hand_over(scheduler=scheduler)
    if rank == 1:
        (directory / "alive").touch()  # so the others wait for it in their next round
    loader = strategy.prepare_train_loader(DataLoader(range(size), 4, shuffle=True))
    steps: list[tuple[int, list[int], float]] = []
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            if rank == 0 and len(steps) == WAITS:
                (directory / "going on").touch()
                wait_for(directory / "alive")
            steps.append((epoch, batch.tolist(), optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()
            loss(model, len(steps), rank).backward()
            optimizer.step()
            scheduler.step()
        assert epoch in {of for of, *_ in steps}, "it is not empty"
        scheduler.step()
    sync.end()
    sync.detach()
    return steps


@pytest.mark.parametrize("size", [60, 32], ids=["within an epoch", "at the end of one"])
def test_one_that_comes_in_fabric_has_the_others_place_and_learning_rate(size: int, tmp_path: Path) -> None:
    of_0, of_1 = launch_replicas(train_in_fabric, 2, size, tmp_path, num_replicas=1)
    came = len(of_0) - len(of_1)
    assert came > WAITS
    expected = seen(Data(size, 4), {0: "0", came: "01"}, 2)
    for number, steps in (("0", of_0), ("1", of_1)):
        assert [(epoch, batch) for epoch, batch, _ in steps] == expected[number]
    assert [rate for *_, rate in of_1] == [rate for *_, rate in of_0[came:]]
