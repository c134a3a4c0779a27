"""Averages of parameters under the next forward pass: first layers first, each until a module needs it.

A step takes t_bp + max(t_ff, t_ar) instead of t_ff + t_bp + t_ar.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter, hook_gradient
from lightning_pipesync.methods.gradients.feedpipe import ExecutionOrder, FeedPipe, UnwrittenWeights
from lightning_pipesync.methods.replicas.weights import Weights


class AveragedBucket:
    """A bucket whose average runs under the next forward pass; ``number`` is that of the optimizer's buckets."""

    def __init__(self, weights: Weights, number: int, names: dict[int, str]) -> None:
        self._weights, self._number = weights, number
        self.parameters = weights.tensors
        of_parameters = [names[id(parameter)] for parameter in self.parameters]
        self._unwritten = UnwrittenWeights(self.parameters, of_parameters, own_writes=1)
        self._average: Queued[Tensor] | None = None

    def start_update(self, queue: CommQueue) -> None:
        self._unwritten.begin_update()
        what = f"bucket {self._number}"
        self._average = queue.submit("all_reduce", self._weights.start, self._weights.finish, what=what)

    def wait(self) -> None:
        """Blocks until the average is there; raises a RuntimeError, too, if somebody has written to the weights."""
        if self._average is not None:
            self._average.wait()
            self._unwritten.end_update()

    def arrives(self, timeout_s: float) -> bool:
        if self._average is None:
            return True
        self._unwritten.forget_update()
        if arrived := self._average.succeeds(timeout_s):
            self._average.wait()
        return arrived


class ForwardOverlap:
    """Runs the averages of a synchronized step, of the parameters of each optimizer, under the next forward pass."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[NamedParameter],
        replicas: Sequence[Sequence[Weights]],
        transport: Transport,
    ) -> None:
        order = ExecutionOrder(module, transport.device)
        names = {id(parameter.tensor): parameter.name for parameter in parameters}
        self._queue = CommQueue("pipesync-averages", transport.device, transport.traffic)
        # Buckets are in the reverse order of the parameters, which is taken for that of the forward pass.
        self._of_optimizer = [
            [AveragedBucket(bucket, number, names) for number, bucket in reversed([*enumerate(buckets)])]
            for buckets in replicas
        ]
        self.buckets = [bucket for buckets in self._of_optimizer for bucket in buckets]
        needed = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self._feedpipe: FeedPipe[AveragedBucket] = FeedPipe(module, order, self._queue)
        self._feedpipe.set_buckets(self.buckets, needed)
        self._hooks = [hook_gradient(parameter, order.gradient_is_ready) for parameter in needed]

    def start(self, optimizer: int) -> None:
        """Starts the averages of one optimizer's parameters."""
        self._feedpipe.start(self._of_optimizer[optimizer])

    def end_step(self) -> None:
        """Waits for the weights that may be read where no module's forward pass waits for them."""
        self._feedpipe.end_step()

    def wait(self) -> None:
        """Waits for all averages."""
        self._feedpipe.wait()

    def give_up(self, timeout_s: float) -> int:
        """See :meth:`FeedPipe.give_up`."""
        return self._feedpipe.give_up(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Removes the hooks, and ends the thread."""
        for hook in self._hooks:
            hook.remove()
        self._feedpipe.remove_hooks()
        self._queue.close(timeout_s)
