"""ByteScheduler: partitioned all-reduces by priority, under backward and the next forward (Peng et al., SOSP 2019).

The all-reduce of a layer that the next forward pass needs early overtakes those of later layers. For that tensors are
split: a piece that is on its way is not interrupted.

[Note: one order]
Rank 0 chooses what is next among the pieces whose gradients are ready there, and tells the others.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines.over_transport import OverTransport
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.comm.comm_queue import Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.parameters import hook_gradient, modules_with_parameters
from lightning_pipesync.lab.bench.candidates import sgd
from lightning_pipesync.lab.bench.models import BenchModel


class ByteScheduler(OverTransport):
    """All-reduces of pieces of tensors; the first layers go first, and each layer waits for its own weights only.

    Args:
        model: the model that it trains.
        partition_mb: the most MiB of a piece.
    """

    def __init__(self, model: BenchModel, partition_mb: float) -> None:
        super().__init__(f"ByteScheduler, {partition_mb:g} MiB", model, "eager")
        self._tensors = [parameter.tensor for parameter in self.in_ready_order[::-1]]  # by priority
        self._index = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self._gradients = [torch.zeros_like(tensor).flatten() for tensor in self._tensors]
        step = max(1, int(partition_mb * MIB) // self._tensors[0].element_size())
        pieces = [(index, piece) for index, flat in enumerate(self._gradients) for piece in flat.split(step)]
        self._pieces = [piece for _, piece in pieces]
        self._owner = [index for index, _ in pieces]
        self._pieces_of: list[list[int]] = [[] for _ in self._tensors]
        for number, (index, _) in enumerate(pieces):
            self._pieces_of[index].append(number)
        self._optimizers = [sgd([tensor]) for tensor in self._tensors]
        self._left = [0] * len(self._tensors)  # pieces of each gradient that are not averaged
        self._outdated: set[int] = set()  # weights that are not updated
        self._ready: list[int] = []  # a heap of the pieces that have not started
        self._changed = threading.Condition()
        self._submitted: deque[Queued[Tensor]] = deque()
        self._started: deque[int] = deque()  # the pieces, in the order in which they end
        self._announced: list[Handle[None]] = []
        self.hooks = [hook_gradient(tensor, self._gradient_is_ready) for tensor in self._tensors]
        self.hooks += [
            child.register_forward_pre_hook(self._updating([self._index[id(p)] for p in child.parameters(False)]))
            for child in modules_with_parameters(model.module)
        ]

    def step(self) -> None:
        loss = self.model.loss(self.model.module, self.batch)
        self.drain()  # what no module has waited for
        self._outdated = set(range(len(self._tensors)))
        self._left = [len(pieces) for pieces in self._pieces_of]
        for _ in self._pieces:
            self._submitted.append(self.queue.submit("all_reduce", self._start_next))
        self.queue.start_finishing()
        loss.backward()

    def drain(self) -> None:
        for index in range(len(self._tensors)):
            self._update(index)
        for handle in self._announced:
            handle.wait()
        self._announced.clear()

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        index = self._index[id(parameter)]
        assert parameter.grad is not None
        self._gradients[index].copy_(parameter.grad.flatten())
        with self._changed:
            for number in self._pieces_of[index]:
                heapq.heappush(self._ready, number)
            self._changed.notify()

    def _start_next(self) -> Handle[Tensor]:
        """Starts the all-reduce of the next piece, see [Note: one order]; on the queue's thread."""
        number = self._choose() if self.transport.rank == 0 else self._follow()
        self._started.append(number)
        return self.transport.all_reduce(self._pieces[number], mean=True)

    def _choose(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready))
            number = heapq.heappop(self._ready)
        for rank in range(1, self.transport.world_size):
            self._announced.append(self.transport.send(torch.tensor([number]), rank))
        return number

    def _follow(self) -> int:
        announced = torch.empty(1, dtype=torch.int64)
        self.transport.recv(announced, 0).wait()
        number = int(announced)
        with self._changed:
            self._changed.wait_for(lambda: number in self._ready)
            self._ready.remove(number)
        return number

    def _updating(self, indices: list[int]) -> Callable[[nn.Module, Any], None]:
        """Returns a hook that brings these weights up to date."""

        def update(module: nn.Module, args: Any) -> None:
            for index in indices:
                self._update(index)

        return update

    def _update(self, index: int) -> None:
        """Waits for a gradient, and updates its weights."""
        while self._left[index]:
            self._submitted.popleft().wait()
            self._left[self._owner[self._started.popleft()]] -= 1
        if index in self._outdated:
            self._outdated.remove(index)
            tensor = self._tensors[index]
            tensor.grad = self._gradients[index].view_as(tensor)
            self._optimizers[index].step()
            tensor.grad = None
