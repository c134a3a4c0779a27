"""Synchronous training with a parameter server, the baseline of Pipe-SGD (poster, Experiments)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_pipesync.bench.tasks import Task
from lightning_pipesync.bench.trainings import OverTransport
from lightning_pipesync.core.buckets import Bucket


@dataclass(frozen=True)
class PSSyncConfig:
    """Settings of synchronous training with a parameter server: there are none."""


class PSSync(OverTransport):
    """Every rank pushes its gradient to the server, which updates the weights by the average, and pulls them.

    The server is rank 0, which trains, too. It takes as many steps as DDP, and more time: the gradients and weights of
    all ranks pass its link, without overlap.
    """

    def __init__(self, task: Task, config: PSSyncConfig) -> None:
        super().__init__(task)
        self._gradient = Bucket(self._parameters)
        self._workers = range(1, self._transport.world_size)
        self._pushed = [torch.empty_like(self._gradient.flat) for _ in self._workers]  # on rank 0

    def update(self) -> None:
        self._gradient.pack([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        if self._transport.rank == 0:
            self._serve()
        else:
            self._transport.send(self._gradient.flat, 0).wait()
            self._transport.recv(self._weights.flat, 0).wait()
            self._weights.unpack(self._parameters)

    def _serve(self) -> None:
        """Takes the step with all ranks' gradients, and sends the weights."""
        for handle in [self._transport.recv(one, rank) for one, rank in zip(self._pushed, self._workers, strict=True)]:
            handle.wait()
        for pushed in self._pushed:
            self._gradient.flat.add_(pushed)
        self._gradient.flat.div_(self._transport.world_size)
        self._gradient.unpack([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        self._clip()
        self.optimizer.step()
        self._weights.pack(self._parameters)
        for handle in [self._transport.send(self._weights.flat, rank) for rank in self._workers]:
            handle.wait()
