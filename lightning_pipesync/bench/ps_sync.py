"""Synchronous training of a task with a parameter server, the baseline of Pipe-SGD (poster, Experiments)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipesync.bench.baselines import CentralServer
from lightning_pipesync.bench.tasks import Task
from lightning_pipesync.bench.trainings import OverTransport


@dataclass(frozen=True)
class PSSyncConfig:
    """Settings of synchronous training with a parameter server: there are none."""


class PSSync(OverTransport):
    """It takes as many steps as DDP, and more time."""

    def __init__(self, task: Task, config: PSSyncConfig) -> None:
        super().__init__(task)
        self._server = CentralServer(self._transport, self._parameters)

    def update(self) -> None:
        self._server.step(self._clip_and_step)

    def _clip_and_step(self) -> None:
        self._clip()
        self.optimizer.step()
