"""A process of ``benchmarks.goodput``: it trains until it is killed, and writes a log of its steps.

``python -m benchmarks.churn.replica SETTINGS FOLDER``, with SETTINGS as JSON. The log is a line of JSON for each
event, with the ``time`` of the system's monotonic clock, the ``pid``, and the number of rounds: ``start``, ``begin``
before the first step, ``step``, and ``undone`` if the steps since the last round are. In DDP each step is a round.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.churn.emulated_replica import build, take_steps
from benchmarks.churn.torchft_diloco import diloco
from lightning_pipesync import LocalSGD
from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME
from lightning_pipesync.core.files import replacing


class Log:
    """The log of a replica; each process of it adds its lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self.write("start")

    def write(self, event: str, rounds: int | None = None) -> None:
        line = {"time": time.monotonic(), "pid": os.getpid(), "event": event, "rounds": rounds}
        self._file.write(json.dumps(line) + "\n")


def end_with_parent() -> None:
    """Has the system kill this process when the thread that has started it ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def train_local_sgd(settings: dict[str, Any], folder: Path) -> None:
    """Trains by this package's method; what starts it has set where the lighthouse is."""
    log = Log(folder / f"{os.environ[NAME]}.jsonl")
    model = build(settings["mib"], settings["step_s"])
    optimizer = SGD(model.parameters(), lr=1e-3)
    options = {"period": settings["period"], "timeout_s": settings["timeout_s"]}
    sync = LocalSGD(model, optimizer, outer_optimizer="nesterov", **options)
    sync.join()
    log.write("begin", sync.num_rounds)

    def update() -> None:
        sync.step()
        log.write("step", sync.num_rounds)

    while True:
        take_steps(model, update, 1)


def train_torchft(settings: dict[str, Any], folder: Path) -> None:
    """Trains by torchft's DiLoCo, with a lighthouse of its own."""
    log, replica = Log(folder / f"{os.environ[NAME]}.jsonl"), int(os.environ[NAME])
    model = build(settings["mib"], settings["step_s"])
    optimizer = SGD(model.parameters(), lr=1e-3)
    period, timeout_s = settings["period"], settings["timeout_s"]
    with diloco(model, optimizer, os.environ[ADDRESS], replica, period=period, timeout_s=timeout_s) as manager:
        log.write("begin", manager.current_step())
        while True:
            before = manager.current_step()
            for _ in range(period):
                take_steps(model, optimizer.step, 1)
                log.write("step", manager.current_step())
            if manager.current_step() == before:
                log.write("undone", before)


def train_ddp(settings: dict[str, Any], folder: Path) -> None:
    """Trains by DDP under torchrun, from the last checkpoint on."""
    log = Log(folder / f"{os.environ['RANK']}.jsonl")
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings["timeout_s"]))
    checkpoint, number = folder / "checkpoint.pt", 0
    model = build(settings["mib"], settings["step_s"])
    optimizer = SGD(model.parameters(), lr=1e-3)
    if checkpoint.exists():
        state = torch.load(checkpoint)
        number = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    parallel = DistributedDataParallel(model)
    log.write("begin", number)
    while True:
        take_steps(parallel, optimizer.step, 1)
        number += 1
        log.write("step", number)
        if number % settings["checkpoint_steps"] == 0 and dist.get_rank() == 0:
            state = {"step": number, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with replacing(checkpoint) as temporary:
                torch.save(state, temporary)


#: What is compared, by name.
KINDS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "local_sgd": train_local_sgd,
    "torchft DiLoCo": train_torchft,
    "ddp": train_ddp,
}


def main(settings: str, folder: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    read = json.loads(settings)
    KINDS[read["kind"]](read, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
