"""Nobody waits for a rank that is known to have raised, though its process lives on and no connection breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync import DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.harness import free_port, launch
from tests.models import OPTIMIZERS, batch, loss, seeded_mlp
from tests.test_failures import RANKS, form_group

#: Far more than the test takes: nobody may wait for as long.
TIMEOUT_S = 300


class Pipelined:
    """The engine of a pipeline as a loop drives a method."""

    def __init__(self, model: nn.Sequential, _: Any) -> None:
        self.engine = EAPipe(
            model, nn.functional.cross_entropy, lambda parameters: torch.optim.SGD(parameters, 0.1), timeout_s=TIMEOUT_S
        )
        self.detach = self.engine.detach

    def step(self) -> None:
        self.engine.train_batch(batch(0, 0))


METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "dear": lambda model, optimizer: DeAR(model, optimizer, timeout_s=TIMEOUT_S),
    "ea_pipe": Pipelined,
    "local_sgd": lambda model, optimizer: LocalSGD(model, optimizer, timeout_s=TIMEOUT_S, period=2),
    "pipe_sgd": lambda model, optimizer: PipeSGD(model, optimizer, timeout_s=TIMEOUT_S),
    "selsync": lambda model, optimizer: SelSync(model, optimizer, timeout_s=TIMEOUT_S, delta=0.0),
    "sync": lambda model, optimizer: ParameterServer(model, optimizer, timeout_s=TIMEOUT_S, policy="sync"),
    "async": lambda model, optimizer: ParameterServer(model, optimizer, timeout_s=TIMEOUT_S, policy="async"),
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
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = METHODS[name](model, optimizer)

    def train() -> None:
        try:
            for i in range(10_000):
                if i == 3 and rank == victim:
                    raise LEAVES[how][0]
                optimizer.zero_grad()
                if name != "ea_pipe":
                    loss(model, i, rank).backward()
                sync.step()
        finally:
            sync.detach()

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
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, str], list[tuple[str, str]]]:
    jobs = {job: free_port() for job in JOBS}
    found = launch(train_until_one_leaves, RANKS * len(JOBS), jobs, tmp_path_factory.mktemp("marks"), init=False)
    return {job: found[RANKS * n : RANKS * (n + 1)] for n, job in enumerate(JOBS)}


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
