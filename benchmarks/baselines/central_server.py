"""A synchronous parameter server on rank 0 (Pipe-SGD, poster, Experiments)."""

from __future__ import annotations

from benchmarks.baselines.over_transport import OverTransport
from benchmarks.learners.push_pull import PushPull
from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.lab.bench.models import BenchModel


class ParameterServerBaseline(OverTransport):
    """Every rank pushes its gradients to the server, which updates the weights by the average, and pulls them.

    The server is rank 0, which trains, too. The gradients and weights of all ranks pass its link, without overlap.
    """

    def __init__(self, model: BenchModel) -> None:
        super().__init__("parameter server", model, "serial")
        self.compression = 1 / self.transport.world_size  # the server's link carries what is of all ranks
        self._parameters = [parameter.tensor for parameter in self.in_ready_order]
        self._gradient, self._weights = Bucket(self._parameters), Bucket(self._parameters)
        self._exchange = PushPull(self.transport, self._gradient.flat.numel(), servers=1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self._gradient.pack_gradients(self._parameters)
        self._exchange.push(self._gradient.flat)
        if self.transport.rank == 0:
            self._gradient.flat.div_(self.transport.world_size)
            self._gradient.unpack([parameter.grad for parameter in self._parameters if parameter.grad is not None])
            self.optimizer.step()
            self._weights.pack(self._parameters)
        self._exchange.pull(self._weights.flat)
        if self.transport.rank != 0:
            self._weights.unpack(self._parameters)
