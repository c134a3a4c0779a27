"""Checkpoints of replicas that Accelerate has sharded: those of Accelerate's own FSDP2, of both kinds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.nightly.shards.test_accelerate_sharded import accelerator_of, fresh_state, fsdp_plugin
from tests.nightly.shards.test_sharded_replicas import (
    REPLICAS,
    SETTINGS,
    SHARDS,
    adamw,
    batch,
    device_mesh,
    model,
    sharded,
    whole,
)
from tests.support.case_table import Outcomes, launch_cases

#: Methods, kinds of checkpoint, and after how many steps they are saved. Pipe-SGD has no optimizer state after one.
SAVED = (
    ("dear", "SHARDED_STATE_DICT", 4),
    ("dear", "FULL_STATE_DICT", 4),
    ("pipe_sgd, momentum", "SHARDED_STATE_DICT", 4),
    ("pipe_sgd", "FULL_STATE_DICT", 1),
    ("selsync", "FULL_STATE_DICT", 4),
    ("streaming", "SHARDED_STATE_DICT", 4),
)
BY_THE_USER = ("dear", "diloco")
STEPS = 7


class Training:
    """A model that an Accelerator has prepared, with a method or, if ``name`` is None, by Accelerate alone (HSDP)."""

    accelerator: Accelerator

    def __init__(self, name: str | None, kind: str | None) -> None:
        if kind is None:  # the user shards it, along a mesh of the user's own
            method, settings = SETTINGS[str(name)]
            self.accelerator = PipeSyncAccelerator(PipeSyncPlugin(method, timeout_s=60, **settings))
            self.module: nn.Module = sharded(device_mesh()["shards"])
        else:
            self.accelerator = accelerator_of(name, plugin=fsdp_plugin(state_dict_type=kind))
            self.module = model()
        optimizer = adamw(self.module)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        self.network, self.optimizer, self.scheduler = self.accelerator.prepare(self.module, optimizer, scheduler)

    def run(self, begin: int, end: int) -> None:
        self.network.train()
        for step in range(begin, end):
            inputs, targets = batch(dist.get_rank(), step)
            self.optimizer.zero_grad()
            self.accelerator.backward((self.network(inputs) - targets).square().mean())
            self.optimizer.step()
            self.scheduler.step()

    def weights(self) -> list[Tensor]:
        self.network.eval()
        return whole(self.module)

    def end(self) -> list[Tensor]:
        weights = self.weights()
        self.accelerator.free_memory()
        return weights


def resumed(name: str, kind: str | None, saved_at: int, folder: Path) -> dict[str, Any]:
    """Returns the weights that a run loads, and those with which it ends."""
    with fresh_state():
        training = Training(name, kind)
        training.run(0, 1)  # something else, which loading replaces
        training.accelerator.load_state(str(folder))
        loaded = training.weights()
        training.run(saved_at, STEPS)
        return {"loaded": loaded, "resumed": training.end()}


def resume(name: str, kind: str, saved_at: int, folder: Path) -> dict[str, Any]:
    """Saves a run that goes on, and resumes it; Accelerate alone loads its checkpoint, and the other way round."""
    folder = folder / f"{name} {kind} {saved_at}"
    found: dict[str, Any] = {}
    with fresh_state():
        first = Training(name, kind)
        first.run(0, saved_at)
        first.accelerator.save_state(str(folder / "method"))
        found["saved"] = first.weights()
        first.accelerator.save_model(first.network, str(folder / "model"))
        first.run(saved_at, STEPS)
        found["expected"] = first.end()
    found |= resumed(name, kind, saved_at, folder / "method")
    with fresh_state():
        alone = Training(None, kind)
        alone.accelerator.load_state(str(folder / "method"))
        found["loaded by FSDP2"] = alone.weights()
        alone.run(saved_at, STEPS)
        found["FSDP2 goes on"] = alone.weights()
        alone.accelerator.save_state(str(folder / "alone"))
        alone.run(STEPS, STEPS + 2)
        found["of FSDP2"] = alone.end()
    with fresh_state():
        third = Training(name, kind)
        third.accelerator.load_state(str(folder / "alone"))
        found["loaded of FSDP2"] = third.weights()
        third.run(STEPS, STEPS + 2)
        found["goes on from FSDP2"] = third.end()
    return found


def resume_what_the_user_sharded(name: str, folder: Path) -> dict[str, Any]:
    """Saves a run that goes on, and resumes it."""
    folder = folder / name
    found: dict[str, Any] = {}
    with fresh_state():
        first = Training(name, None)
        first.run(0, 4)
        first.accelerator.save_state(str(folder))
        found["saved"] = first.weights()
        first.run(4, STEPS)
        found["expected"] = first.end()
    return found | resumed(name, None, 4, folder)


@pytest.fixture(scope="module")
def runs(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {saved: partial(resume, *saved, folder) for saved in SAVED}
    cases |= {name: partial(resume_what_the_user_sharded, name, folder) for name in BY_THE_USER}
    return launch_cases(cases, REPLICAS * SHARDS, init=False)


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_resumes_bit_for_bit_and_accelerate_loads_it(saved: tuple[str, str, int], runs: Outcomes, folder: Path) -> None:
    for found in runs[saved]:
        pairs = [("loaded", "saved"), ("resumed", "expected"), ("loaded by FSDP2", "saved")]
        pairs.append(("loaded of FSDP2", "FSDP2 goes on"))
        if saved[0] == "dear":  # which is HSDP, with the optimizer's state, too
            pairs += [("FSDP2 goes on", "expected"), ("goes on from FSDP2", "of FSDP2")]
        for key, expected in pairs:
            assert all(map(torch.equal, found[key], found[expected])), (key, expected)
        assert not all(map(torch.equal, found["saved"], found["expected"]))


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_the_saved_model_is_a_whole_one(saved: tuple[str, str, int], runs: Outcomes, folder: Path) -> None:
    directory = folder / " ".join(map(str, saved))
    files = [directory / "model" / "model.safetensors"]
    if saved[1] == "SHARDED_STATE_DICT":
        merge_fsdp_weights(str(directory / "method" / "pytorch_model_fsdp_0"), str(directory / "merged"))
        files.append(directory / "merged" / "model.safetensors")
    for file in files:
        plain = model()
        plain.load_state_dict(load_file(file))
        assert all(map(torch.equal, plain.parameters(), runs[saved][0]["saved"]))


@pytest.mark.parametrize("name", BY_THE_USER)
def test_what_the_user_has_sharded_has_the_checkpoint_of_a_whole_model(name: str, runs: Outcomes, folder: Path) -> None:
    """It resumes bit for bit; with DeAR it is the run of a model that Accelerate has sharded."""
    for found in runs[name]:
        for key, expected in (("loaded", "saved"), ("resumed", "expected")):
            assert all(map(torch.equal, found[key], found[expected])), (key, expected)
    plain = model()
    plain.load_state_dict(load_file(folder / name / "model.safetensors"))
    assert all(map(torch.equal, plain.parameters(), runs[name][0]["saved"]))
    optimizer = adamw(plain)
    optimizer.load_state_dict(torch.load(folder / name / "optimizer.bin", weights_only=True))
    assert all(state["exp_avg"].shape == value.shape for value, state in optimizer.state.items())
    if name == "dear":
        expected = runs["dear", "FULL_STATE_DICT", 4][0]["expected"]
        assert all(map(torch.equal, runs[name][0]["expected"], expected))
