"""What is drilled: processes that train together, and what is to come of it."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.training import registry
from tests.conformance.methods import Method
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.drill.case import Case
from tests.drill.phases import Gate

#: Seconds that survivors have in addition to the timeout, from a fault to their end.
MARGIN_S = 10.0
#: Steps after which a checkpoint is saved.
SAVED_EVERY = 2


class Subject(ABC):
    """Processes that train together, by number.

    Attributes:
        members: the number of processes.
        folder: where they save checkpoints.
    """

    members: int
    folder: Path
    has_lighthouse = False

    @abstractmethod
    def environment(self, member: int, host: str, port: int) -> dict[str, str]:
        """Returns the variables of a process; host and port are those of the store of its job, or the lighthouse."""

    @abstractmethod
    def run(self, member: int, gate: Gate, resumed: Checkpoint | None) -> dict[str, Any]:
        """Trains, in the process, to the end; returns what all members, and an undisturbed run, are to have alike."""

    def folder_of(self, member: int) -> Path:
        """Returns where a process saves checkpoints."""
        return self.folder

    @abstractmethod
    def limit_s(self, watched: bool) -> float:
        """Returns the seconds that survivors have to end, from a fault on; ``watched``: a method was attached."""


class Job(Subject):
    """One job: a method in a framework, a rank in each process, in the training of the conformance suite."""

    def __init__(self, case: Case, folder: Path, timeout_s: float) -> None:
        self.members, self.folder = case.ranks, folder
        self._case, self._timeout_s = case, timeout_s
        folder.mkdir(parents=True, exist_ok=True)

    def environment(self, member: int, host: str, port: int) -> dict[str, str]:
        of_job = {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "WORLD_SIZE": self.members,
            "LOCAL_WORLD_SIZE": self.members,
        }
        of_rank = {"RANK": member, "LOCAL_RANK": member, "NODE_RANK": 0, "GROUP_RANK": 0}
        of_host = {"OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": "true"}
        return {name: str(value) for name, value in (of_job | of_rank | of_host).items()}

    def run(self, member: int, gate: Gate, resumed: Checkpoint | None) -> dict[str, Any]:
        case = self._case
        gate.reach("init")
        if case.framework == "plain":
            dist.init_process_group("gloo", timeout=timedelta(seconds=self._timeout_s))
        options = Options(ranks=self.members, timeout_s=self._timeout_s, passes=gate.passes)
        settings = {**case.settings, "timeout_s": self._timeout_s}
        save = Checkpoint(self.folder / "at", SAVED_EVERY, after_error=False)
        return result_of(train(case.framework, method_of(case), settings, options, save=save, resume=resumed).weights)

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the checkpoints, the last one first."""
        steps = {int(path.stem.split("-")[1]) for path in self.folder.glob("at-*")}
        found = [Checkpoint(self.folder / f"at-{step}", step) for step in sorted(steps, reverse=True)]
        return [one for one in found if all(self.files_of(one, member) for member in range(self.members))]

    def has_been_saved(self, checkpoint: Checkpoint) -> bool:
        """Returns whether the training has not ended before all of the checkpoint was saved, with Accelerate, too."""
        if self._case.framework != "accelerate":
            return True
        return all((checkpoint.path / f"pipesync_{member}.bin").exists() for member in range(self.members))

    def files_of(self, checkpoint: Checkpoint, member: int) -> list[Path]:
        """Returns the files of a checkpoint that a process reads: in a plain loop each has its own."""
        name = {"plain": f"at-{checkpoint.at}-{member}", "lightning": f"at-{checkpoint.at}.ckpt"}
        path = self.folder / name.get(self._case.framework, f"at-{checkpoint.at}")
        files = path.iterdir() if path.is_dir() else [path]
        return sorted(file for file in files if file.is_file())

    def limit_s(self, watched: bool) -> float:
        # Before a method is attached torch waits for its store, and an attempt may take as long as all of them.
        return self._timeout_s * (1 if watched else 3) + MARGIN_S


def method_of(case: Case) -> Method:
    """Returns the method of a case, as the conformance suite trains with it."""
    registered = registry.METHODS[case.method]
    return Method(case.method, registered, {}, (), ("", None), pipeline=registered.makes_passes)


def result_of(weights: Tensor) -> dict[str, Any]:
    """Returns what is compared of weights."""
    return {"weights": digest({"": weights.detach()}), "finite": bool(weights.isfinite().all())}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
