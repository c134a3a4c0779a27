"""A rank that shares the device is killed, or freezes: the other one ends in time, and names it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

from lightning_pipesync import DeAR, SelSync
from tests.cuda.device import DEVICE, ON_GPU, launch_on_device, launch_over_nccl, skip_unless_over_nccl
from tests.support.harness import DIED, kill_stopped_siblings

TIMEOUT_S = 15
METHODS = {"dear": (DeAR, {"bucket_mb": 0.01}), "selsync": (SelSync, {"delta": 0.0})}
#: A rehearsal has one method.
NAMES = [*METHODS][: None if ON_GPU else 1]


def train_until_lost(name: str, backend: str, number: int) -> tuple[str, float]:
    """Returns the error of the rank that is left, and after how many seconds it was raised."""
    make, settings = METHODS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = make(model, optimizer, backend=backend, timeout_s=TIMEOUT_S, **settings)
    began = time.monotonic()
    try:
        for step in range(1000):
            if step == 20 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), number)
            model(torch.ones(8, 64, device=DEVICE)).square().mean().backward()
            sync.step()
            model.zero_grad()
        return "", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        sync.detach()
        kill_stopped_siblings()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("name", NAMES)
def test_the_other_rank_names_it(name: str, backend: str, number: int) -> None:
    if backend == "nccl":
        skip_unless_over_nccl()
    start = launch_over_nccl if backend == "nccl" else launch_on_device
    [(message, seconds), died] = start(train_until_lost, 2, name, backend, number, may_die=(1,), timeout_s=120)
    assert died == DIED
    assert "Rank 1" in message
    assert ("is frozen" if number == signal.SIGSTOP else "has died") in message
    assert seconds < 60
