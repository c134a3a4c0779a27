"""Nobody waits for a rank that is known to have raised, though its process lives on and no connection breaks."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.nightly.faults.test_failures import RANKS, Pipelined, form_group, launch_jobs
from tests.support.harness import free_port
from tests.support.models import Run

#: Far more than the test takes: nobody may wait for as long.
TIMEOUT_S = 300


METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "dear": (DeAR, {}),
    "ea_pipe": (Pipelined, {}),
    "local_sgd": (LocalSGD, {"period": 2}),
    "pipe_sgd": (PipeSGD, {}),
    "selsync": (SelSync, {"delta": 0.0}),
    "sync": (ParameterServer, {"policy": "sync"}),
    "async": (ParameterServer, {"policy": "async"}),
}

#: The method, the rank that leaves, and how.
JOBS = [
    ("dear", 0, "raises"),
    ("ea_pipe", 1, "raises"),
    ("ea_pipe", 2, "raises"),
    ("local_sgd", 1, "raises"),
    ("pipe_sgd", 0, "raises"),
    ("selsync", 2, "raises"),
    ("sync", 0, "raises"),
    ("async", 1, "raises"),
    ("async", 2, "raises"),
    ("async", 2, "is interrupted"),
    ("async", 2, "exits"),
]

#: What a rank raises, and what the others say of it.
LEAVES: dict[str, tuple[BaseException, str]] = {
    "raises": (KeyError("a bug in the loop"), "it raised KeyError: 'a bug in the loop'"),
    "is interrupted": (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
    "exits": (SystemExit(0), "it has ended without an error"),
}


def train_until_one_leaves(jobs: dict[tuple[str, int, str], int], folder: Path) -> tuple[str, str]:
    (name, victim, how), rank = form_group(jobs)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    method, settings = METHODS[name]
    run = Run(method, timeout_s=TIMEOUT_S, **settings)

    def train() -> None:
        try:
            for i in range(10_000):
                if i == 3 and rank == victim:
                    raise LEAVES[how][0]
                run.step(i)
        finally:
            run.sync.detach()

    try:
        train()
        found = ("", "")
    except BaseException as error:
        found = type(error).__name__, str(error)
    marks = [folder / f"{name} {victim} {how} {other}" for other in range(RANKS) if other != victim]
    if rank != victim:
        (folder / f"{name} {victim} {how} {rank}").touch()
    while rank == victim and not all(mark.exists() for mark in marks):
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[tuple[str, int, str], list[tuple[str, str]]]:
    return launch_jobs(train_until_one_leaves, {job: free_port() for job in JOBS}, folder)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_all_others_end_at_once_and_name_it(outcomes: Any, job: tuple[str, int, str]) -> None:
    _, victim, how = job
    error, words = LEAVES[how]
    for rank, (kind, message) in enumerate(outcomes[job]):
        if rank == victim:
            assert (kind, message) == (type(error).__name__, str(error)), "it keeps its own error"
        else:
            assert kind == "RuntimeError", message
            assert message.splitlines()[-1].startswith(f"Rank {victim} (host "), message
            assert words in message, message
