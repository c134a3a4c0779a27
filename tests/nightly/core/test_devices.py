"""What costs time or goes wrong on CUDA alone: several devices and streams, and a host that waits for its device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipesync import DeAR, LocalSGD, PipeSGD, SelSync
from lightning_pipesync.core.rng import rng_states, set_rng_states
from lightning_pipesync.methods.sync_method import SyncMethod
from tests.streams.device import cuda
from tests.streams.streams import own_device
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks
from tests.support.models import OPTIMIZERS, Run, seeded_mlp

SECOND = torch.device("cuda", 1)

#: How often the host waits for the device in a step, by method and settings: SelSync for its trigger, Pipe-SGD for the
#: norm of a gradient of an earlier step.
WAITS: dict[str, tuple[Callable[..., SyncMethod], dict[str, Any], int]] = {
    "DeAR": (DeAR, {"bucket_mb": 0.001}, 0),
    "DeAR, sharded": (DeAR, {"bucket_mb": 0.001, "update": "sharded"}, 0),
    "SelSync, synchronized": (SelSync, {"delta": 0.0}, 1),
    "SelSync, local": (SelSync, {"delta": 10.0}, 1),
    "Pipe-SGD": (PipeSGD, {}, 1),
    "local SGD": (LocalSGD, {"period": 2}, 0),
}


class WaitsForTheDevice(TorchDispatchMode):
    """Counts the operations of this thread for which the host would wait until a device has computed a value."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def waits_by_step(make: Callable[..., SyncMethod], settings: dict[str, Any], clips: bool) -> list[int]:
    run = Run(make, model=seeded_mlp(batch_norm=True), **settings)
    waits = []
    for step in range(16):
        with WaitsForTheDevice() as counted:
            run.backward(step)
            if clips:
                run.sync.clip(1.0)
            run.sync.step()
        waits.append(counted.number)
    run.sync.detach()
    return waits[-4:]  # the first steps measure and observe


def test_how_often_the_host_waits_for_the_device_in_a_step() -> None:
    outcomes = launch_cases(
        {
            (name, clips): partial(waits_by_step, make, settings, clips)
            for name, (make, settings, _) in WAITS.items()
            for clips in (False, True)
        },
        2,
    )
    for name, (_, _, number) in WAITS.items():
        for clips in (False, True):
            assert outcomes[name, clips] == [[number] * 4] * 2, (name, clips)


def test_the_random_state_is_that_of_the_device_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[Any, Any] = {SECOND: torch.ones(3)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: states.update({device: state}))
    saved = rng_states(SECOND)
    states[SECOND] = torch.zeros(3)
    set_rng_states(saved, SECOND)
    assert list(states) == [SECOND]
    assert torch.equal(states[SECOND], torch.ones(3))
    set_rng_states(saved, torch.device("cpu"))  # a training that goes on without its device
    assert list(states) == [SECOND]


def warnings_of_attaching(backend: str) -> list[str]:
    """Returns what is warned of when a method is attached to a network with four SyncBatchNorm."""
    with cuda(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)) for _ in range(4)]
        model = nn.Sequential(*blocks, nn.BatchNorm1d(4)).to(own_device())
        DeAR(model, OPTIMIZERS["sgd"](model), backend=backend).detach()
    return [str(warning.message) for warning in caught if "SyncBatchNorm" in str(warning.message)]


def test_sync_batch_norm_over_nccl_is_named_on_rank_0() -> None:
    """And none that no collective meets."""
    outcomes = launch_cases({backend: partial(warnings_of_attaching, backend) for backend in ("nccl", "gloo")}, 2)
    [[message], others] = outcomes["nccl"]
    assert "DeAR" in message
    assert "SyncBatchNorm (0.1, 1.1, 2.1 and 1 more)" in message
    assert others == []
    assert outcomes["gloo"] == [[], []]
    assert on_ranks(warnings_of_attaching, 1, "nccl") == [[]]
