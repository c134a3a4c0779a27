"""A rank that leaves, before a method is attached or by a SIGTERM, is named at once by all others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric

from lightning_pipesync.fabric import DeARFabricStrategy
from tests.nightly.faults.test_failures import RANKS, form_group, launch_jobs
from tests.support.harness import free_port
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer
from tests.support.lost_ranks import be_patient
from tests.support.models import OPTIMIZERS, seeded_mlp

#: Far more than the test takes: nobody may wait for as long.
TIMEOUT_S = 300
#: Where only the timeout tells that one does something else than the others.
SHORT_S = 40

#: The method, the rank that leaves, and how.
JOBS = [
    ("dear", 0, "configure_optimizers"),
    ("ea_pipe", 1, "configure_optimizers"),
    ("dear", 2, "checkpoint"),
    ("fabric", 1, "before setup"),
    ("dear", 1, "SIGTERM"),
    ("ea_pipe", 1, "SIGTERM"),
    ("ea_pipe", 2, "SIGTERM"),
    ("local_sgd", 2, "SIGTERM"),
    ("parameter_server", 1, "SIGTERM"),
    ("selsync", 0, "SIGTERM"),
    ("ea_pipe", 0, "ends its epoch"),
    ("ea_pipe", 1, "ends its epoch"),
    ("ea_pipe", 2, "ends its epoch"),
    ("local_sgd", 2, "ends its epoch"),
]

#: Further settings.
OTHERS = {"local_sgd": {"period": 2}}

#: What is said by those who learn of it by its flags, in place of a wait that ends.
CONSOLIDATES = "Rank 2 is about to consolidate the weights, for the end of an epoch"

#: What all others say of it.
SAYS = {
    "configure_optimizers": "it raised KeyError: 'a bug'",
    "checkpoint": "it raised UnpicklingError",
    "before setup": "it raised KeyError: 'a bug'",
    "ends its epoch": "it has ended its epoch after 5 batches, and others have not",
    "SIGTERM": "it raised SIGTERMException",
}


class Leaving(Classifier):
    """One rank leaves, in the midst of a step or before the first one."""

    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.leaves = leaves

    def configure_optimizers(self) -> Any:
        if self.leaves == "configure_optimizers":
            raise KeyError("a bug")
        return super().configure_optimizers()

    def on_train_batch_start(self, *_: Any) -> int | None:
        return -1 if self.leaves == "ends its epoch" and self.global_step >= 4 else None

    def on_before_zero_grad(self, _: Any) -> None:
        if self.leaves == "SIGTERM" and self.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def set_up_fabric(leaves: bool) -> None:
    """A script of Fabric's that ends with an exception before the method is attached, or waits for one that does."""
    strategy = DeARFabricStrategy(timeout_s=TIMEOUT_S)
    fabric = Fabric(strategy=strategy, devices=RANKS, accelerator="cpu")
    fabric.launch()
    model = seeded_mlp()
    try:
        if leaves:
            raise KeyError("a bug")
        fabric.setup(model, OPTIMIZERS["sgd"](model))
    finally:
        strategy.teardown()


def fit_until_one_leaves(jobs: dict[tuple[str, int, str], int], directory: Path) -> tuple[str, str]:
    job, rank = form_group(jobs)
    name, victim, how = job
    be_patient()
    folder = directory / f"{name} {victim} {how}"
    settings = {
        "name": "dear" if name == "fabric" else name,
        "timeout_s": SHORT_S if how == "ends its epoch" else TIMEOUT_S,
    }
    run = trainer(make_strategy({**settings, **OTHERS.get(name, {})}), RANKS, folder, max_epochs=1000)
    checkpoint = None
    if how == "checkpoint":
        folder.mkdir(exist_ok=True)
        checkpoint = folder / f"{rank}.ckpt"
        head = {"pytorch-lightning_version": pl.__version__, "epoch": 0, "global_step": 0}
        torch.save({**head, "state_dict": Classifier().state_dict()}, checkpoint)
        if rank == victim:
            checkpoint.write_bytes(b"damaged")
    try:
        if name == "fabric":
            set_up_fabric(leaves=rank == victim)
        else:
            run.fit(Leaving(how if rank == victim else ""), train_loader(), ckpt_path=checkpoint, weights_only=True)
        found = ("", "")
    except BaseException as error:
        found = type(error).__name__, str(error)
    (directory / f"{name} {victim} {how} {rank}").touch()
    while rank == victim and not all((directory / f"{name} {victim} {how} {one}").exists() for one in range(RANKS)):
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[tuple[str, int, str], list[tuple[str, str]]]:
    return launch_jobs(fit_until_one_leaves, {job: free_port() for job in JOBS}, folder)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_all_others_name_it(outcomes: Any, job: tuple[str, int, str]) -> None:
    _, victim, how = job
    for rank, (kind, message) in enumerate(outcomes[job]):
        if rank == victim:
            assert how == "ends its epoch" or kind in SAYS[how], "it keeps its own error"
        else:
            assert kind == "RuntimeError", message
            if job == ("local_sgd", 2, "ends its epoch") and message.startswith(CONSOLIDATES):
                continue
            assert message.splitlines()[-1].startswith(f"Rank {victim} (host "), message
            told_of = CONSOLIDATES if CONSOLIDATES in message else SAYS[how]
            assert told_of in message, message
