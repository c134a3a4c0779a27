"""Stale-synchronous parallel training with a parameter server (Ho et al.; SelSync, Section II-C)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.bench.tasks import Task
from lightning_pipesync.bench.trainings import OverTransport
from lightning_pipesync.core.buckets import Bucket


@dataclass(frozen=True)
class SSPConfig:
    """Settings of SSP."""

    s: int = 100
    """The most steps that a rank may be ahead of the slowest one."""

    def __post_init__(self) -> None:
        if self.s < 0:
            raise ValueError(f"s of SSP must be at least 0, got {self.s!r}.")


class ParameterServer:
    """The weights to which the gradients of all ranks are applied one after the other, in the order of arrival.

    Args:
        module: the module with the weights.
        optimizer: the optimizer of the weights.
        staleness: the most steps that a rank may be ahead of the slowest one.
        world_size: the number of ranks.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, staleness: int, world_size: int) -> None:
        self.parameters, self._optimizer, self._staleness = list(module.parameters()), optimizer, staleness
        self._steps = [0] * world_size
        self._changed = threading.Condition()
        self._gradient = Bucket(self.parameters)
        for parameter, view in zip(self.parameters, self._gradient.views, strict=True):
            parameter.grad = view

    def push_and_pull(self, rank: int, gradient: Tensor, weights: Bucket) -> None:
        """Applies the fused ``gradient`` of ``rank``, and copies the weights once that rank may continue."""
        with self._changed:
            self._gradient.flat.copy_(gradient)
            self._optimizer.step()
            self._steps[rank] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._steps[rank] - min(self._steps) <= self._staleness)
            weights.pack(self.parameters)

    def leave(self, rank: int) -> None:
        """Ends the waiting of other ranks for ``rank``."""
        with self._changed:
            self._steps[rank] = 2**62
            self._changed.notify_all()


class SSP(OverTransport):
    """Every rank pushes its gradient to the server on rank 0, at its own pace, and pulls the weights."""

    def __init__(self, task: Task, config: SSPConfig) -> None:
        super().__init__(task)
        self._gradient = Bucket(self._parameters)
        self._message = torch.zeros(self._gradient.flat.numel() + 1)  # the gradient, and whether this rank leaves
        self._threads: list[threading.Thread] = []
        self._server: ParameterServer | None = None
        if self._transport.rank == 0:
            master = deepcopy(self.module)
            self.optimizer = task.optimizer(master)  # the schedule changes its learning rate
            self._server = ParameterServer(master, self.optimizer, config.s, self._transport.world_size)
            self._threads = [
                threading.Thread(target=self._serve, args=(rank, self._server), daemon=True)
                for rank in range(1, self._transport.world_size)
            ]
            for thread in self._threads:
                thread.start()

    def update(self) -> None:
        self._clip()
        self._gradient.pack([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        if self._server:
            self._server.push_and_pull(0, self._gradient.flat, self._weights)
        else:
            self._message[:-1] = self._gradient.flat
            self._transport.send(self._message, 0).wait()
            self._transport.recv(self._weights.flat, 0).wait()
        self._weights.unpack(self._parameters)

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        """Yields the module with the server's weights, after a barrier."""
        dist.barrier()
        if self._server:
            self._weights.pack(self._server.parameters)
        self._transport.broadcast(self._weights.flat).wait()
        self._weights.unpack(self._parameters)
        yield self.module

    @property
    def lssr(self) -> float | None:
        return None

    def close(self) -> None:
        if self._server:
            self._server.leave(0)
        else:
            self._message[-1] = 1
            self._transport.send(self._message, 0).wait()
        for thread in self._threads:
            thread.join()
        super().close()

    def _serve(self, rank: int, server: ParameterServer) -> None:
        """Serves one rank until it leaves."""
        message, weights = torch.empty_like(self._message), Bucket(self._parameters)
        try:
            while True:
                self._transport.recv(message, rank).wait()
                if message[-1]:
                    return
                server.push_and_pull(rank, message[:-1], weights)
                self._transport.send(weights.flat, rank).wait()
        finally:
            server.leave(rank)
