"""One rank of a benchmark: ``python -m lightning_pipesync.lab.bench.worker MEASURE TYPE SETTINGS METHODS RESULT``.

MEASURE and TYPE name a function and the dataclass of its settings, as MODULE:NAME; SETTINGS is JSON. So is METHODS, the
names of the classes of the user's methods. Rank 0 writes its result as JSON to the file RESULT, and its progress in
lines that start with PROGRESS.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.lab.bench.preflight import exchange_facts
from lightning_pipesync.training.registry import METHODS

#: The prefix of a line of progress on standard output.
PROGRESS = "@progress "


#: How long a rank waits for the others to start.
TIMEOUT = timedelta(minutes=5)

#: Measures on one rank, within an initialized default process group: called with its settings, a dataclass, and with a
#: function to call with a description after each part.
Measure = Callable[[Any, Callable[[str], object]], dict[str, Any]]


def run_rank(measure: Measure, settings: Any, progress: Callable[[str], object]) -> dict[str, Any] | None:
    """Runs a benchmark as the rank of the environment; returns the result on rank 0."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    exchange_facts(store, rank, world_size)
    cuda, backend = getattr(settings, "device", "cpu") == "cuda", getattr(settings, "backend", "nccl")
    if cuda:
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus and (backend == "nccl" or not num_gpus):
            raise ValueError(f"Rank {rank} is for GPU {local_rank} of its host, which has {num_gpus}.")
        torch.cuda.set_device(local_rank % num_gpus)
    backends = f"cpu:gloo,cuda:{backend}" if cuda else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size)
    leader = dist.get_rank() == 0
    measured = measure(settings, progress if leader else lambda text: None)
    dist.barrier()
    dist.destroy_process_group()
    return measured if leader else None


def words_for(measure: Measure, settings: Any) -> list[str]:
    """Returns the words MEASURE, TYPE, SETTINGS and METHODS of the command."""
    found = (__name__.partition(".")[0], "__main__")  # here, and in no module
    of_user = [_name_of(method) for method in METHODS.values() if method.__module__.partition(".")[0] not in found]
    as_json = json.dumps(asdict(settings), default=str)
    return [_name_of(measure), _name_of(type(settings)), as_json, json.dumps(of_user)]


def _name_of(one: Any) -> str:
    return f"{one.__module__}:{one.__qualname__}"


def main(measure: str, settings_type: str, settings: str, methods: str, result: str) -> None:
    for name in json.loads(methods):
        method = resolve_name(name)
        METHODS[method.name] = method
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(settings).items()}
    chosen = resolve_name(settings_type)(**values)
    torch.set_num_threads(1)  # the processes of all emulated hosts share this machine
    measured = run_rank(resolve_name(measure), chosen, lambda text: print(PROGRESS + text, flush=True))
    if measured is not None:
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
