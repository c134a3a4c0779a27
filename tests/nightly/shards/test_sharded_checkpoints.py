"""Checkpoints of replicas that FSDP2 has sharded: of torch.distributed.checkpoint, and consolidated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import SGD, Optimizer

from lightning_pipesync import METHODS
from tests.nightly.shards.test_sharded_replicas import (
    REPLICAS,
    SETTINGS,
    SHARDS,
    adamw,
    batch,
    device_mesh,
    sharded,
    whole,
)
from tests.support.case_table import Outcomes, launch_cases

NAMES = ("dear", "pipe_sgd", "selsync", "local_sgd", "diloco", "streaming")
SAVED_AT, STEPS = 5, 9  # within a round of local SGD


class Training:
    """A replica of two shards, which a method trains once it is attached, and FSDP2 alone before."""

    def __init__(self, optimizer: Callable[[nn.Module], Optimizer] = adamw) -> None:
        self.mesh = device_mesh()
        self.module = sharded(self.mesh["shards"])
        self.optimizer = optimizer(self.module)
        self.sync: Any = None

    def attach(self, name: str) -> None:
        method, settings = SETTINGS[name]
        replicas = self.mesh["replicas"]
        self.sync = METHODS[method](self.module, self.optimizer, replicas=replicas, timeout_s=60, **settings)

    def run(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            inputs, targets = batch(dist.get_rank(), step)
            self.optimizer.zero_grad()
            (self.module(inputs) - targets).square().mean().backward()
            (self.sync or self.optimizer).step()

    def save(self, folder: Path, consolidated: bool) -> dict[str, Any]:
        """Saves the consolidated weights; returns the method's own state of this rank."""
        self.sync.flush()
        with self.sync.given_back():
            options = StateDictOptions(full_state_dict=consolidated, cpu_offload=consolidated)
            model, optimizer = get_state_dict(self.module, self.optimizer, options=options)
        if not consolidated:
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        elif dist.get_rank() == 0:
            folder.mkdir()
            torch.save({"model": model, "optimizer": optimizer}, folder / "whole.pt")
        state: dict[str, Any] = copy.deepcopy(self.sync.state_dict())
        self.sync.resume()
        dist.barrier()
        return state

    def load(self, folder: Path, consolidated: bool) -> None:
        """Loads a checkpoint before a method is attached."""
        options = StateDictOptions(full_state_dict=consolidated)
        if consolidated:
            saved = torch.load(folder / "whole.pt", weights_only=True)
        else:
            model, optimizer = get_state_dict(self.module, self.optimizer)
            saved = {"model": model, "optimizer": optimizer}
            dcp.load(saved, checkpoint_id=folder)
        states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(self.module, self.optimizer, **states, options=options)


def resume(name: str, consolidated: bool, folder: Path) -> dict[str, list[Tensor]]:
    """Returns the weights of a run that is saved at a step and goes on, of one that resumes, and what FSDP2 loads."""
    folder = folder / f"{name} {consolidated}"
    first, second, alone = Training(), Training(), Training()
    first.attach(name)
    first.run(0, SAVED_AT)
    state = first.save(folder, consolidated)
    first.sync.flush()
    saved = whole(first.module)
    first.sync.resume()
    first.run(SAVED_AT, STEPS)
    first.sync.flush()
    first.sync.detach()
    second.load(folder, consolidated)
    second.attach(name)
    second.sync.load_state_dict(state)
    second.run(SAVED_AT, STEPS)
    second.sync.flush()
    second.sync.detach()
    alone.load(folder, consolidated)
    loaded = whole(alone.module)
    alone.run(SAVED_AT, STEPS)  # with the state of its optimizer
    weights = {"expected": whole(first.module), "resumed": whole(second.module), "saved": saved, "loaded": loaded}
    return {**weights, "alone": whole(alone.module)}


def save_without_state(name: str, folder: Path) -> list[list[Tensor]]:
    """Returns the weights of a run whose optimizer has no state, and which is saved; and of one that is not saved."""
    weights = []
    for saves in (True, False):
        training = Training(lambda module: SGD(module.parameters(), lr=0.1))
        training.attach(name)
        for begin in (0, 2):
            if saves:
                training.optimizer.zero_grad()
                training.save(folder / f"{name} {begin}", consolidated=False)
            training.run(begin, begin + 2)
        training.sync.flush()
        training.sync.detach()
        weights.append(whole(training.module))
    return weights


@pytest.fixture(scope="module")
def runs(folder: Path) -> Outcomes:
    cases = {(name, kind): partial(resume, name, kind, folder) for name in NAMES for kind in (False, True)}
    cases |= {(name, "without state"): partial(save_without_state, name, folder) for name in NAMES}
    return launch_cases(cases, REPLICAS * SHARDS)


@pytest.mark.parametrize("consolidated", [False, True], ids=["sharded", "consolidated"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_bit_for_bit_and_fsdp2_loads_its_checkpoint(
    name: str, consolidated: bool, runs: Outcomes
) -> None:
    for weights in runs[name, consolidated]:
        for key, expected in (("resumed", "expected"), ("loaded", "saved")):
            assert all(map(torch.equal, weights[key], weights[expected])), key
        assert all(value.isfinite().all() for value in weights["alone"])


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_without_a_state_is_saved(name: str, runs: Outcomes) -> None:
    """``get_state_dict`` makes the state that it misses by a step of zeros."""
    for saved, never_saved in runs[name, "without state"]:
        assert all(map(torch.equal, saved, never_saved))
