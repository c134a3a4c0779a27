"""Gradients averaged in each step: in a warm-up (post-local SGD), and in a group that trains one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.gradients.backpipe import MISSING, OUTDATED, BackPipe
from lightning_pipesync.methods.gradients.bucket import GradientBuckets
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.replicas.flags import check_flags, exchange_flags

#: Maximum seconds that the thread is waited for at the end.
CLOSE_S = 1.0


class SynchronousGradients:
    """Averages the gradients of an optimizer in each step, as DDP does: buckets start under the backward pass.

    Before the first all-reduce of a pass the ranks exchange flags, so that a rank that does something else is named,
    and no all-reduce waits for it.

    Args:
        buckets: the optimizer's parameters, in the order of the forward pass.
        in_group: whether the ranks of a group average them, or all ranks of ``transport``.
        starts_in_pass: returns whether all-reduces start under the backward pass, now that a gradient is ready; None:
            they start after it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[list[Tensor]],
        transport: Transport,
        in_group: bool,
        starts_in_pass: Callable[[Tensor], bool] | None,
    ) -> None:
        self._optimizer, self._transport = optimizer, transport
        self._row = transport.row if in_group else None
        ready_order = list(reversed(buckets))  # the last layers' gradients are ready first
        self._gradients = GradientBuckets(ready_order, self._row or transport)
        self._queue = CommQueue("pipesync-gradients", transport.device, transport.traffic)
        self._backpipe = BackPipe(
            self._queue,
            may_start=starts_in_pass or (lambda parameter: False),
            before_first=lambda: self._exchange(0),
            started=lambda index: self._gradients.buckets[index].note_gradients(),
            were_written=self._were_written,
        )
        self._backpipe.buckets, self._backpipe.index_of = self._gradients.buckets, self._gradients.index_of
        if starts_in_pass is not None:
            self._backpipe.hook_gradients(tensor for bucket in ready_order for tensor in bucket)

    def average(self) -> None:
        """Replaces every gradient by its average over the ranks; a collective call.

        A missing gradient counts as zero. A gradient that no rank has stays None, as in DDP.

        Raises:
            RuntimeError: the optimizer has new parameters; some rank is about to consolidate the weights; or a peer is
                lost.
        """
        averaged = self._gradients.index_of
        if any(id(p) not in averaged and p.requires_grad for p in parameters_of(self._optimizer)):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} has new parameters, whose gradients are not averaged: set "
                f"{'warmup_steps=0' if self._row is None else 'ranks_per_replica=1'}, or add them before the training."
            )
        flags = self._backpipe.finish(self._exchange)
        self._forget_gradients()
        if flags & MISSING:
            self._gradients.add_missing()
        self._gradients.unpack()

    def drop(self) -> None:
        """Waits for all-reduces that no step follows; a collective call if there are any."""
        if self._backpipe.in_step:
            self._backpipe.finish(self._exchange, unless=OUTDATED)
            self._forget_gradients()

    def close(self) -> None:
        """Ends the thread, and removes the hooks."""
        self._backpipe.remove_hooks()
        self._queue.close(CLOSE_S)

    def _were_written(self) -> bool:
        """Whether a further backward pass, or the user's loop before its step, has changed a gradient."""
        return any(bucket.written() is not None for bucket in self._gradients.buckets)

    def _forget_gradients(self) -> None:
        for bucket in self._gradients.buckets:
            bucket.forget_gradients()

    def _exchange(self, flag: int) -> Queued[list[int]]:
        """Queues an exchange of flags, after which nothing starts if some rank takes no step."""
        row, transport = self._row, self._transport
        ranks = (row or transport).ranks

        def exchange() -> Handle[list[int]]:
            if row is not None:
                return row.exchange_flags(flag)
            return Handle(lambda: exchange_flags(transport, flag))

        return self._queue.submit("flags", exchange, lambda flags: check_flags(flags, ranks))
