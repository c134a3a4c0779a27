"""A synchronous parameter server on one of the ranks (Pipe-SGD, poster, Experiments)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.papers.baselines.over_transport import OverTransport
from lightning_pipesync.lab.papers.baselines.push_pull import PushPull


class CentralServer:
    """Every rank pushes its gradients to the server, which updates the weights by the average, and pulls them.

    The server is rank 0, which trains, too. The gradients and weights of all ranks pass its link, without overlap.

    Args:
        transport: the way to the other ranks.
        parameters: all of them have gradients.
    """

    def __init__(self, transport: Transport, parameters: Sequence[Tensor]) -> None:
        self._transport, self._parameters = transport, list(parameters)
        self._gradient, self._weights = Bucket(self._parameters), Bucket(self._parameters)
        self._exchange = PushPull(transport, self._gradient.flat.numel(), servers=1)

    def step(self, update: Callable[[], object]) -> None:
        """Takes a step; a collective call.

        Args:
            update: updates the weights by the gradients; called on rank 0.
        """
        self._gradient.pack_gradients(self._parameters)
        self._exchange.push(self._gradient.flat)
        if self._transport.rank == 0:
            self._gradient.flat.div_(self._transport.world_size)
            self._gradient.unpack([parameter.grad for parameter in self._parameters if parameter.grad is not None])
            update()
            self._weights.pack(self._parameters)
        self._exchange.pull(self._weights.flat)
        if self._transport.rank != 0:
            self._weights.unpack(self._parameters)


class ParameterServerBaseline(OverTransport):
    """Synchronous training with a central parameter server.

    Args:
        model: the model that it trains.
    """

    def __init__(self, model: BenchModel) -> None:
        super().__init__("parameter server", model, "serial")
        self.compression = 1 / self.transport.world_size  # the server's link carries what is of all ranks
        self._server = CentralServer(self.transport, [parameter.tensor for parameter in self.in_ready_order])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self._server.step(self.optimizer.step)
