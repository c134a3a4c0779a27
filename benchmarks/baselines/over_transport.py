"""What the baselines have in common: an optimizer, a transport and its queue, and the order of the parameters."""

from __future__ import annotations

from functools import cached_property

from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import collect_parameters
from lightning_pipesync.lab.bench.candidates import Candidate, sgd
from lightning_pipesync.lab.bench.models import BenchModel


class OverTransport(Candidate):
    """A candidate whose gradients are averaged by this package's transport.

    Args:
        name: the name in tables.
        model: the model that it trains.
        limit: the property of :class:`StepCost` that bounds its step.

    Attributes:
        hooks: removed at the end.
        in_ready_order: the trained parameters in the order in which, as DDP assumes, their gradients become ready: the
            reverse of their order in the module.
    """

    def __init__(self, name: str, model: BenchModel, limit: str) -> None:
        super().__init__(name, model)
        self.limit = limit
        self.optimizer = sgd(model.module.parameters())
        self.transport: Transport = Transport()
        self.in_ready_order = collect_parameters(model.module, [self.optimizer])[::-1]
        self.hooks: list[RemovableHandle] = []

    @cached_property
    def queue(self) -> CommQueue:
        """Issues collectives in the order in which they are submitted, on a thread of its own."""
        return CommQueue("pipesync-baseline", self.transport.device, self.transport.traffic)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if "queue" in vars(self):
            self.queue.close(10.0)
        self.transport.close()

    def backward(self) -> None:
        """Runs the forward and the backward pass."""
        self.model.loss(self.model.module, self.batch).backward()
