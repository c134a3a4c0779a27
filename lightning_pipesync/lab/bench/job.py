"""Runs a benchmark on the ranks of a launcher, the hosts of an emulated network, or processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import TCPStore

from lightning_pipesync.lab import netlab
from lightning_pipesync.lab.bench.worker import PROGRESS, Measure, run_rank, words_for
from lightning_pipesync.lab.netlab.options import LinkOptions
from lightning_pipesync.lab.netlab.processes import raising_signals

#: The number of lines of output that an error message quotes.
QUOTED = 20

#: Seconds in which the other ranks end, by themselves or by an error that names the rank that has failed.
GRACE_S = 150.0


@dataclass(frozen=True)
class Hosts:
    """The hosts of a benchmark, with a rank each."""

    count: int
    #: Without a rate they are processes on this machine, which talk over loopback.
    links: LinkOptions = field(default_factory=LinkOptions)


def launched() -> bool:
    """Returns whether a launcher (torchrun, ``pipesync netlab``) has started this process as a rank.

    ValueError if ``srun`` has started it, which sets other variables than torch's: each task would plan for itself.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
        raise ValueError(
            f"srun has started {tasks} tasks of this command, which would not know of each other. Start torchrun once "
            "on each node, with its number of GPUs: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
            "--nproc-per-node=... --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29400 -m lightning_pipesync ..."
        )
    return False


def run_job(measure: Measure, settings: Any, hosts: Hosts, progress: Callable[[str], object]) -> dict[str, Any] | None:
    """Runs a benchmark and returns rank 0's result; None on the other ranks that a launcher has started.

    Raises:
        RuntimeError: a rank failed (the message quotes its last lines), or the machine cannot emulate a network.
        ValueError: the settings of the network are invalid.
    """
    if launched():
        return run_rank(measure, settings, progress)
    with TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        worker = [sys.executable, "-m", "lightning_pipesync.lab.bench.worker"]
        command = [*worker, *words_for(measure, settings), str(result)]
        last: deque[str] = deque(maxlen=QUOTED)

        def on_line(rank: int, line: str) -> None:
            if line.startswith(PROGRESS):
                progress(line.removeprefix(PROGRESS).strip())
            else:
                last.append(f"rank {rank}: {line.rstrip()}")

        if hosts.links.rate is None:
            status = _run_here(command, hosts.count, on_line)
        else:
            with hosts.links.network(hosts.count) as network:
                status = netlab.run_job(network, command, output=on_line)
        if status or not result.exists():
            raise RuntimeError("\n".join([f"The benchmark ended with exit status {status}.", *last]))
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def _run_here(command: list[str], num_ranks: int, on_line: Callable[[int, str], object]) -> int:
    """Runs ``command`` as ``num_ranks`` ranks on this machine; returns the first exit status that is not 0, else 0.

    When one has ended, the others are killed after :data:`GRACE_S`. The store is in this process, as under torchrun: a
    port that is only reserved for rank 0's store may be taken before, even by a rank that connects to itself there.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_ranks)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]

    def read(rank: int) -> None:
        for line in ranks[rank].stdout or ():
            on_line(rank, line)

    readers = [threading.Thread(target=read, args=(rank,)) for rank in range(num_ranks)]
    try:
        with raising_signals():
            for reader in readers:
                reader.start()
            while all(process.poll() is None for process in ranks):
                time.sleep(0.1)
            deadline = time.monotonic() + GRACE_S
            for process in ranks:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                process.kill()
            for reader in readers:
                reader.join()
        return next((status for process in ranks if (status := process.wait())), 0)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
