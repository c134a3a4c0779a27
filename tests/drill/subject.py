"""What is drilled: processes that train together, and what is to come of it."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_pipesync.core.digest import digest
from tests.drill.case import Case
from tests.drill.phases import Gate
from tests.drill.training import PlainLoop, PlainPipeline, Task, step_of

#: Seconds that survivors have in addition to the timeout, from a fault to their end.
MARGIN_S = 10.0

#: A training, and that of a pipeline: of a task on a gate, perhaps from a checkpoint; they return the weights.
Trainings = tuple[Any, Any]


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
    def run(self, member: int, gate: Gate, resumed: Path | None) -> dict[str, Any]:
        """Trains, in the process, to the end; returns what all members, and an undisturbed run, are to have alike."""

    def folder_of(self, member: int) -> Path:
        """Returns where a process saves checkpoints."""
        return self.folder

    @abstractmethod
    def limit_s(self, watched: bool) -> float:
        """Returns the seconds that survivors have to end, from a fault on; ``watched``: a method was attached."""


class Job(Subject):
    """One job: a method in a framework, a rank in each process."""

    def __init__(self, case: Case, folder: Path, timeout_s: float) -> None:
        self.members, self.folder = case.ranks, folder
        self._case, self._timeout_s = case, timeout_s
        folder.mkdir(parents=True, exist_ok=True)

    def environment(self, member: int, host: str, port: int) -> dict[str, str]:
        of_job = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": self.members}
        of_rank = {"RANK": member, "NODE_RANK": member, "GROUP_RANK": member}
        of_host = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": "true"}
        return {name: str(value) for name, value in (of_job | of_rank | of_host).items()}

    def run(self, member: int, gate: Gate, resumed: Path | None) -> dict[str, Any]:
        case = self._case
        task = Task(case.method, case.settings, member, self.members, self.folder, self._timeout_s)
        gate.reach("init")
        train = TRAININGS[case.framework]()[task.pipelined]
        return result_of(train(task, gate, resumed))

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints, the last one first."""
        found = (path for path in self.folder.glob("at-*") if path.name[3:4].isdigit() and self._is_complete(path))
        return sorted(found, key=step_of)[::-1]

    def _is_complete(self, checkpoint: Path) -> bool:
        """Returns whether all ranks have written theirs, if each writes one, as a user has to look."""
        if checkpoint.is_file() or not list(checkpoint.glob("[0-9]*.pt")):
            return True
        return all((checkpoint / f"{member}.pt").exists() for member in range(self.members))

    def has_been_saved(self, checkpoint: Path) -> bool:
        """Returns whether the training has not ended before all of the checkpoint was saved, with Accelerate, too."""
        if self._case.framework != "accelerate":
            return True
        return all((checkpoint / f"pipesync_{member}.bin").exists() for member in range(self.members))

    def files_of(self, checkpoint: Path, member: int) -> list[Path]:
        """Returns the files of a checkpoint that a process reads."""
        if checkpoint.is_file():
            return [checkpoint]
        own = checkpoint / f"{member}.pt"
        return [own] if own.exists() else sorted(path for path in checkpoint.iterdir() if path.is_file())

    def limit_s(self, watched: bool) -> float:
        # Before a method is attached torch waits for its store, and an attempt may take as long as all of them.
        return self._timeout_s * (1 if watched else 3) + MARGIN_S


def result_of(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Returns what is compared of weights."""
    finite = all(bool(value.isfinite().all()) for value in weights.values())
    return {"weights": digest({name: value.detach() for name, value in weights.items()}), "finite": finite}


def plainly() -> Trainings:
    return PlainLoop.train, PlainPipeline.train


def in_trainer() -> Trainings:
    from tests.drill.in_lightning import fit

    return fit, fit


def in_fabric() -> Trainings:
    from tests.drill.in_lightning import FabricLoop

    return FabricLoop.train, None


def with_accelerate() -> Trainings:
    from tests.drill.in_accelerate import AccelerateLoop, AcceleratePipeline

    return AccelerateLoop.train, AcceleratePipeline.train


#: By framework, what imports it, and returns its training and that of a pipeline.
TRAININGS: dict[str, Callable[[], Trainings]] = {
    "plain": plainly,
    "lightning": in_trainer,
    "fabric": in_fabric,
    "accelerate": with_accelerate,
}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
