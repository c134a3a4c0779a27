"""The training that is drilled: a small network on each rank, in a plain loop or by a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_pipesync.training.registry import METHODS
from tests.drill.phases import EPOCHS, STEPS, STEPS_OF_EPOCH, Gate

BATCH_SIZE, FEATURES, CLASSES, WIDTH = 4, 6, 2, 10


@dataclass(frozen=True)
class Task:
    """What a rank trains.

    Args:
        method: its name in the registry.
        settings: the method's.
        rank: this rank, or the job's number.
        ranks: their number, or that of the jobs.
        folder: where checkpoints are saved.
        timeout_s: of the method and of the default process group.
        alone: whether this process is a job of its own.
    """

    method: str
    settings: dict[str, Any]
    rank: int
    ranks: int
    folder: Path
    timeout_s: float
    alone: bool = False

    @property
    def size(self) -> int:
        """The number of processes of this job."""
        return 1 if self.alone else self.ranks

    @property
    def pipelined(self) -> bool:
        return METHODS[self.method].makes_passes

    @property
    def all_settings(self) -> dict[str, Any]:
        return {**self.settings, "timeout_s": self.timeout_s}

    def network(self, gate: Gate) -> nn.Sequential:
        """Returns a network whose layers are gates, so that each stage of a pipeline has one."""
        torch.manual_seed(self.rank)  # the method makes rank 0's weights those of all
        widths = [FEATURES, *[WIDTH] * self.ranks, CLASSES]
        return nn.Sequential(*(GateLayer(gate, *ends) for ends in pairwise(widths)))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's batch of a step; the stages of a pipeline have the same."""
        return batch_of(step, 0 if self.pipelined else self.rank)

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"at-{step}"


class GateLayer(nn.Linear):
    """A layer with an activation, in whose forward and backward passes faults strike."""

    def __init__(self, gate: Gate, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        self.gate.reach("forward")
        y = super().forward(x).tanh()
        if y.requires_grad:
            y.register_hook(lambda _: self.gate.reach("backward"))
        return y


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(BATCH_SIZE, FEATURES, generator=generator) * (1 + (7 * step + 3 * rank) % 4)
    return x, (x.sum(dim=1) > 0).long()


class Samples(Dataset[Any]):
    """The samples of all ranks."""

    def __init__(self, ranks: int) -> None:
        batches = [batch_of(step, rank) for rank in range(ranks) for step in range(STEPS_OF_EPOCH)]
        self.x, self.y = (torch.cat(values) for values in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def optimizer_of(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y)


class Loop(ABC):
    """A training in a loop of the user's own; its construction is a collective call."""

    model: nn.Module

    def __init__(self, task: Task, gate: Gate) -> None:
        self.task, self.gate = task, gate

    @abstractmethod
    def train_on(self, x: Tensor, y: Tensor) -> None:
        """Makes the passes of a batch, and the step."""

    @abstractmethod
    def consolidate(self) -> None:
        """Makes the weights the consolidated ones, as before a validation, and goes on."""

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """Ends the training, with the consolidated weights in the model."""

    @classmethod
    def train(cls, task: Task, gate: Gate, resumed: Path | None) -> dict[str, Tensor]:
        """Trains on this rank, see :meth:`run`."""
        return cls(task, gate).run(resumed)

    def run(self, resumed: Path | None) -> dict[str, Tensor]:
        """Trains to the end, perhaps from a checkpoint; returns the consolidated weights."""
        first = 0
        if resumed is not None:
            self.load(resumed)
            first = step_of(resumed)
        for step in range(first, STEPS):
            self.gate.step = step + 1
            x, y = self.task.batch(step)
            self.train_on(x, y)
            if (step + 1) % STEPS_OF_EPOCH == 0:
                self.gate.reach("flush")
                self.consolidate()
                self.gate.reach("checkpoint")
                self.save(self.task.checkpoint(step + 1))
        self.gate.reach("end")
        self.end()
        return self.model.state_dict()

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self.gate.poison(loss_of(output, y))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2].partition(".")[0])


class DividesData(Loop):
    """A loop in a job that is a replica: the jobs divide the data, and each saves checkpoints of its own."""

    @property
    @abstractmethod
    def method(self) -> Any:
        """The method that trains."""

    @abstractmethod
    def prepare(self, loader: DataLoader[Any]) -> Any:
        """Joins the others, and returns the loader of this job's share."""

    def run(self, resumed: Path | None) -> dict[str, Tensor]:
        if resumed is not None:
            self.load(resumed)
        loader = self.prepare(DataLoader(Samples(self.task.ranks), BATCH_SIZE, shuffle=True))
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                self.gate.step = self.method.num_steps + 1
                self.train_on(x, y)
            self.gate.reach("flush")
            self.consolidate()
            self.gate.reach("checkpoint")
            self.save(self.task.checkpoint(self.method.num_steps))
        self.gate.reach("end")
        self.end()
        return self.model.state_dict()


class PlainLoop(Loop):
    """A loop without a framework; its checkpoints are a folder with a file of each rank."""

    def __init__(self, task: Task, gate: Gate) -> None:
        super().__init__(task, gate)
        if not task.alone:
            dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_s))
        self.model = task.network(gate)
        gate.reach("attach")
        self.attach()

    def attach(self) -> None:
        self.optimizer = optimizer_of(self.model.parameters())
        method: Any = METHODS[self.task.method]
        self.sync = method(self.model, self.optimizer, **self.task.all_settings)

    def train_on(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.gate.reach("step")
        self.sync.step()

    def consolidate(self) -> None:
        self.sync.flush()
        self.sync.resume()

    def save(self, path: Path) -> None:
        self.sync.flush()
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.sync.optimizer_state_dict(self.optimizer),
            "pipesync": self.sync.state_dict(),
        }
        self.write(saved, path)
        self.sync.resume()

    def write(self, saved: dict[str, Any], path: Path) -> None:
        path.mkdir(exist_ok=True)
        torch.save(saved, path / f"{self.task.rank}.pt")

    def read(self, path: Path) -> dict[str, Any]:
        saved: dict[str, Any] = torch.load(path / f"{self.task.rank}.pt", weights_only=True)
        return saved

    def load(self, path: Path) -> None:
        saved = self.read(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.sync.load_state_dict(saved["pipesync"])

    def end(self) -> None:
        self.sync.flush()
        self.sync.detach()


class PlainJob(DividesData, PlainLoop):
    """A loop without a framework in a job that is a replica."""

    @property
    def method(self) -> Any:
        return self.sync

    def prepare(self, loader: DataLoader[Any]) -> Any:
        return self.sync.prepare_train_loader(loader)

    def end(self) -> None:
        self.sync.end()
        self.sync.detach()


class TrainsPipeline(Loop):
    """What a pipeline's loops have in common; each makes the engine."""

    engine: Any

    def train_on(self, x: Tensor, y: Tensor) -> None:
        self.engine.feed(lambda: x, lambda output, part: self.loss(output, part(y)))
        if self.engine.backward():
            self.gate.reach("step")
            self.engine.step()

    def consolidate(self) -> None:
        self.engine.flush()


class PlainPipeline(TrainsPipeline, PlainLoop):
    """A pipeline's engine in a loop without a framework."""

    def attach(self) -> None:
        method: Any = METHODS[self.task.method]
        self.engine = method(self.model, None, optimizer_of, **self.task.all_settings)

    def save(self, path: Path) -> None:
        self.engine.flush()
        self.engine.gather()
        self.write({"model": self.model.state_dict(), "pipesync": self.engine.state_dict()}, path)

    def load(self, path: Path) -> None:
        saved = self.read(path)
        self.model.load_state_dict(saved["model"])
        self.engine.load_state_dict(saved["pipesync"])

    def end(self) -> None:
        self.engine.flush()
        self.engine.gather()
        self.engine.detach()
