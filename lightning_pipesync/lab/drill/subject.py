"""What is drilled: processes that train together, and what is to come of it."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_pipesync.core.digest import digest
from lightning_pipesync.lab.drill.case import Case
from lightning_pipesync.lab.drill.phases import Gate
from lightning_pipesync.lab.drill.training import PlainLoop, PlainPipeline, Task, step_of

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

    @abstractmethod
    def environment(self, member: int) -> dict[str, str]:
        """Returns the variables of a process."""

    @abstractmethod
    def run(self, member: int, gate: Gate, resumed: Path | None) -> dict[str, Any]:
        """Trains, in the process, to the end; returns what all members, and an undisturbed run, are to have alike."""

    @abstractmethod
    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints, the last one first."""

    @abstractmethod
    def files_of(self, checkpoint: Path, member: int) -> list[Path]:
        """Returns the files of a checkpoint that a process reads."""


class Job(Subject):
    """One job: a method in a framework, a rank in each process."""

    def __init__(self, case: Case, folder: Path, timeout_s: float) -> None:
        self.members, self.folder = case.ranks, folder
        self._case, self._timeout_s = case, timeout_s
        folder.mkdir(parents=True, exist_ok=True)

    def environment(self, member: int) -> dict[str, str]:
        of_rank = {"RANK": member, "NODE_RANK": member, "GROUP_RANK": member, "WORLD_SIZE": self.members}
        of_host = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": "true"}
        return {name: str(value) for name, value in (of_rank | of_host).items()}

    def run(self, member: int, gate: Gate, resumed: Path | None) -> dict[str, Any]:
        case = self._case
        task = Task(case.method, case.settings, member, self.members, self.folder, self._timeout_s)
        gate.reach("init")
        train = TRAININGS[case.framework]()[task.pipelined]
        weights = train(task, gate, resumed)
        finite = all(bool(value.isfinite().all()) for value in weights.values())
        return {"weights": digest({name: value.detach() for name, value in weights.items()}), "finite": finite}

    def checkpoints(self) -> list[Path]:
        return sorted((path for path in self.folder.glob("at-*") if path.name[3:4].isdigit()), key=step_of)[::-1]

    def files_of(self, checkpoint: Path, member: int) -> list[Path]:
        if checkpoint.is_file():
            return [checkpoint]
        own = checkpoint / f"{member}.pt"
        return [own] if own.exists() else sorted(path for path in checkpoint.iterdir() if path.is_file())


def plainly() -> Trainings:
    return PlainLoop.train, PlainPipeline.train


def in_trainer() -> Trainings:
    from lightning_pipesync.lab.drill.in_lightning import fit

    return fit, fit


def in_fabric() -> Trainings:
    from lightning_pipesync.lab.drill.in_lightning import FabricLoop

    return FabricLoop.train, None


def with_accelerate() -> Trainings:
    from lightning_pipesync.lab.drill.in_accelerate import AccelerateLoop, AcceleratePipeline

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
