"""Replicas that are jobs of their own: with the same members bit for bit the replicas of one job."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipesync import EAPipe, LocalSGD, PipeSyncPlugin, SelSync
from lightning_pipesync.accelerate.launched import check_method
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas

STEPS, PERIOD, SAVED = 11, 3, 7

#: Settings, and whether the weights are those of one job: residuals do not start at zero there.
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "DiLoCo": {"outer_optimizer": "nesterov"},
    "int4": {"outer_optimizer": "nesterov", "compression": "int4"},
    "int2": {"outer_optimizer": "nesterov", "compression": "int2", "residual_decay": 0.9},
    "SparseLoCo": {"outer_optimizer": "sgd", "outer_lr": 0.8, "compression": "chunked_topk"},
    "EASGD": {"outer_optimizer": "elastic"},
    "streaming": {"outer_optimizer": "nesterov", "overlap_steps": 1, "fragments": 2},
    "a share": {"participation": 0.5},
    "states": {"average_optimizer_states": True},
}


#: Where the agreed weights are the average that a flush takes then.
FLUSHED = ("FedAvg", "DiLoCo", "int4", "int2", "SparseLoCo", "states")

#: A replica's own weights, the agreed ones after a round, those at the end, and its data.
Outcome = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], list[int]]


def train(rank: int, settings: dict[str, Any]) -> Outcome:
    model = seeded_mlp(rank, batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S, **settings)
    sync.join()
    loader = sync.prepare_train_loader(DataLoader(range(2 * STEPS), shuffle=True), seed=1)
    samples = [int(sample) for sample, _ in zip(loader, range(STEPS), strict=False)]
    agreed: dict[str, Tensor] = {}
    for step in range(STEPS):
        if step == 2 * PERIOD:
            sync.flush()
            agreed = state(model)
            sync.resume()
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        sync.step()
    own = state(model)
    sync.end()
    last = state(model)
    sync.detach()
    return own, agreed, last, samples


def train_in_one_job(settings: dict[str, Any]) -> Outcome:
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
    model = seeded_mlp(rank)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S)
    sync.join()
    agreed: dict[str, Tensor] = {}
    for step in range(PERIOD + 1 + (rank > 0)):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        sync.step()
        if step == PERIOD - 1:
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
    for step in range(PERIOD + 2):
        if step >= PERIOD:
            found.append(state(model))
        if step == PERIOD + 1:
            sync.flush()
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        sync.step()
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


def resume(rank: int) -> tuple[Any, ...]:
    """Trains on from checkpoints that all have, within a round, and from one that a single replica has; of DiLoCo."""
    saved: dict[str, Any] = {}
    outcomes = []
    for name in ("whole", "resumed", "the last has a checkpoint"):
        model = seeded_mlp(rank, batch_norm=True)
        if name == "resumed" or (saved and rank == 2):
            model.load_state_dict(saved["model"])
        optimizer = OPTIMIZERS["sgd"](model)
        sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S, outer_optimizer="nesterov")
        if name == "resumed" or (saved and rank == 2):
            sync.load_state_dict(saved["method"])
        sync.join()
        first = sync.num_steps
        for step in range(first, STEPS):
            if step == SAVED and name == "whole":
                sync.flush()
                saved = copy.deepcopy({"model": model.state_dict(), "method": sync.state_dict()})
                sync.resume()
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            sync.step()
        sync.end()
        sync.detach()
        outcomes.append((first, state(model)))
    return tuple(outcomes)


def test_replicas_resume_from_the_same_step_bit_for_bit() -> None:
    """Each with its own weights and states. If one alone has a checkpoint, all begin with it."""
    outcomes = launch_replicas(resume, 3)
    for (_, whole), (first, resumed), (last, of_last) in outcomes:
        assert first == last == SAVED
        assert_same(resumed, whole)
        assert_same(of_last, outcomes[0][2][1])


def load_alone(rank: int) -> tuple[str, str] | None:
    """Loads the state of a replica of two in a training without others."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    settings: dict[str, Any] = {"period": 1, "outer_optimizer": "nesterov", "timeout_s": TIMEOUT_S}
    sync = LocalSGD(model, optimizer, **settings)
    sync.join()
    loss(model, 0, rank).backward()
    sync.step()
    saved = sync.state_dict()
    sync.end()
    sync.detach()
    for name in ("PIPESYNC_LIGHTHOUSE", "PIPESYNC_NUM_REPLICAS"):
        del os.environ[name]
    alone = LocalSGD(model, optimizer, **settings)
    outcome = raised(lambda: alone.load_state_dict(saved))
    alone.detach()
    return outcome


def test_a_part_of_the_outer_state_is_not_loaded_without_lighthouse() -> None:
    for rank, outcome in enumerate(launch_replicas(load_alone, 2)):
        assert_raised(outcome, "ValueError", f"of rank {rank} of 2, and there are 1", "lighthouse")


def test_other_methods_refuse_to_be_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPESYNC_LIGHTHOUSE", "host0:29510")
    model = seeded_mlp()
    for make in (
        lambda: SelSync(model, OPTIMIZERS["sgd"](model)),
        lambda: check_method(PipeSyncPlugin("selsync")),  # of an Accelerator with one process, which attaches nothing
    ):
        with pytest.raises(ValueError, match=r"PIPESYNC_LIGHTHOUSE=host0:29510 is set.*SelSync needs all ranks"):
            make()
    with pytest.raises(ValueError, match=r"PIPESYNC_LIGHTHOUSE=host0:29510 is set.*EAPipe needs all ranks"):
        EAPipe(model, None, lambda parameters: OPTIMIZERS["sgd"](torch.nn.ParameterList(parameters)))
    with pytest.raises(ValueError, match=r"and no method: set PIPESYNC_METHOD=local_sgd"):
        check_method(None)
