"""The one CUDA device of these tests, and the ranks that share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.conformance.training import Options
from tests.harness import launch

DEVICE = torch.device("cuda", 0)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: Cycles of a kernel that is still running when the host, which does not wait for it, has gone on: about half a second.
LONG = 10**9


def sleep() -> None:
    """Enqueues a long kernel on the current stream."""
    torch.cuda._sleep(LONG)


def recorded() -> torch.cuda.Event:
    """Returns an event at the end of the present work of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def on_device(options: Options, ranks: int) -> Options:
    return replace(options, device=DEVICE.type, ranks=ranks)


def launch_on_device(
    function: Callable[..., Any], world_size: int, *args: Any, init: bool = True, timeout_s: float = 600
) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` ranks, all of which use the one device."""
    return launch(partial(_use_device, function), world_size, *args, init=init, timeout_s=timeout_s, spawn=True)


def _use_device(function: Callable[..., Any], *args: Any) -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products have the same bits on whichever stream
    torch.cuda.set_device(DEVICE)
    return function(*args)
