"""All ranks meet before they make process groups: one that raises, dies or hangs before is named, not waited for."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_pipesync import DeAR
from tests.nightly.faults.test_failures import RANKS, form_group, launch_jobs
from tests.support.harness import DIED, free_port, kill_stopped_siblings, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, seeded_mlp

#: Far more than the test takes, or less, where a rank hangs.
TIMEOUT_S, HANG_TIMEOUT_S = 300, 15

#: What ends with the process.
LOST = ("dies", "is frozen")

#: The rank that does not come, why, and the backend of the default process group: only "gloo" is asked for a barrier.
JOBS = [
    (0, "dies", "gloo"),
    (1, "dies", "gloo"),
    (2, "dies", "gloo"),
    (1, "hangs", "gloo"),
    (1, "hangs", "cpu:gloo"),
    (0, "is frozen", "gloo"),
    (0, "is frozen", "cpu:gloo"),
    (1, "comes late", "gloo"),
    (1, "comes late", "cpu:gloo"),
]


def attach_without_one(jobs: dict[tuple[int, str, str], int], folder: Path) -> tuple[str, str] | None:
    job, rank = form_group(jobs)
    victim, how, backend = job
    marks = [folder / f"{job} {other}" for other in range(RANKS) if other != victim]
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    dist.barrier()
    if rank == victim and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == victim and how == "is frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == victim and how == "comes late":
        time.sleep(1)
    elif rank == victim:
        wait_for(lambda: all(mark.exists() for mark in marks))
    model = seeded_mlp()
    timeout_s = HANG_TIMEOUT_S if how in ("hangs", "is frozen") else TIMEOUT_S
    found = raised(lambda: DeAR(model, OPTIMIZERS["sgd"](model), timeout_s=timeout_s).detach())
    (folder / f"{job} {rank}").touch()
    if how == "is frozen":
        wait_for(lambda: all(mark.exists() for mark in marks))
        kill_stopped_siblings()
    return found


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    jobs = {job: free_port() for job in JOBS}
    may_die = tuple(RANKS * n + victim for n, (victim, how, _) in enumerate(JOBS) if how in LOST)
    for (victim, how, backend), outcomes in launch_jobs(attach_without_one, jobs, tmp_path, may_die=may_die).items():
        if how == "comes late":
            assert outcomes == [None] * RANKS
            continue
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert outcome == DIED if how in LOST else outcome is not None
                continue
            kind, message = outcome
            assert kind == "RuntimeError", message
            if victim == 0:
                port = jobs[victim, how, backend]
                assert message.startswith("Rank 0 "), message
                assert f"is at fault: the store of the job at 127.0.0.1:{port}, which it runs, does not" in message
            else:
                assert message.startswith(f"Rank {victim} is at fault: it never attached a method: "), message
