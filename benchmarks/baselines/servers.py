"""Synchronous parameter servers on some of the ranks: an exchange, and a training with one (Pipe-SGD, Experiments)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.baselines.over_transport import OverTransport
from lightning_pipesync.core.buckets import Bucket, shard_slice
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.lab.bench.models import BenchModel


class PushPull:
    """Pushes to and pulls from servers on the first ranks, each of which holds a shard of fp32 values.

    All messages of a push, and of a pull, are in flight at once. Every rank calls both, one after the other. One server
    is a central one; as many as ranks spread the load evenly.
    """

    def __init__(self, transport: Transport, numel: int, servers: int) -> None:
        self._transport = transport
        shards = [shard_slice(numel, server, servers) for server in range(servers)]
        self._served = shards[transport.rank] if transport.rank < servers else slice(0, 0)
        # As in an all-to-all: not all ranks begin with the same peer.
        peers = [(transport.rank + step) % transport.world_size for step in range(1, transport.world_size)]
        self._remote = {server: shards[server] for server in peers if server < servers}
        self._workers = sorted(peers) if transport.rank < servers else []
        self._pushed = [torch.empty(self._served.stop - self._served.start) for _ in self._workers]

    def push(self, gradient: Tensor) -> None:
        """Adds all ranks' gradients, in the order of the ranks, to the shard of ``gradient`` that this rank serves."""
        arriving = [
            self._transport.recv(pushed, rank) for pushed, rank in zip(self._pushed, self._workers, strict=True)
        ]
        sending = [self._transport.send(gradient[shard], server) for server, shard in self._remote.items()]
        for handle, pushed in zip(arriving, self._pushed, strict=True):
            handle.wait()
            gradient[self._served].add_(pushed)
        for sent in sending:
            sent.wait()

    def pull(self, weights: Tensor) -> None:
        """Fills ``weights`` with the shards of all servers."""
        arriving = [self._transport.recv(weights[shard], server) for server, shard in self._remote.items()]
        sending = [self._transport.send(weights[self._served], rank) for rank in self._workers]
        for handle in [*arriving, *sending]:
            handle.wait()


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
