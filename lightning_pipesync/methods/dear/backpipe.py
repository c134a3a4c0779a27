"""BackPipe: reduce-scatters run under the backward pass (DeAR, Section III-B)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import hook_gradient
from lightning_pipesync.methods.dear.eager import EagerGathers
from lightning_pipesync.methods.dear.fused_buckets import FusedBuckets
from lightning_pipesync.methods.dear.tuner import FusionTuner
from lightning_pipesync.methods.gradients.backpipe_schedule import BackPipeSchedule
from lightning_pipesync.methods.gradients.execution_order import ExecutionOrder

# The bits of a rank's flag: a parameter has no gradient; a backward pass has changed one after its reduce-scatter
# started; rank 0 knows which bucket size to try next; an optimizer has another state or other parameters.
MISSING, OUTDATED, END_OF_TRIAL, CHANGED = 1, 2, 4, 8


class BackPipe:
    """Averages the gradients of all buckets, once for each backward pass, whichever gradients this rank has.

    Args:
        buckets: the fused parameters.
        order: observes in which order gradients become ready.
        queue: runs the reduce-scatters.
        tuner: knows when the buckets are to change.
        eager: knows which all-gathers start under backward.
        transport: the way to the other ranks.
        is_syncing: returns whether a backward pass starts reduce-scatters.
    """

    def __init__(
        self,
        buckets: FusedBuckets,
        order: ExecutionOrder,
        queue: CommQueue,
        tuner: FusionTuner,
        eager: EagerGathers,
        transport: Transport,
        is_syncing: Callable[[], bool],
    ) -> None:
        self._fused, self._order, self._queue = buckets, order, queue
        self._tuner, self._eager, self._transport = tuner, eager, transport
        self._is_syncing = is_syncing
        self._schedule: BackPipeSchedule | None = None  # of this backward pass
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}

    def hook_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Registers the gradient hooks of ``parameters``, once."""
        for parameter in parameters:
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = hook_gradient(parameter, self._gradient_is_ready)

    def remove_hooks(self) -> None:
        """Removes all gradient hooks."""
        for hook in self._hooks.values():
            hook.remove()

    def finish(self, changed: bool = False) -> bool:
        """Blocks until all gradients are averaged, also those of parameters that had none in this backward pass.

        Args:
            changed: whether an optimizer of this rank has got another state, or other parameters.

        Returns:
            Whether one of some rank has: then nothing is averaged, since the buckets have to change.

        Raises:
            RuntimeError: a peer is lost.
        """
        flags = self._finish_round(CHANGED * changed)
        if flags & CHANGED:
            self._schedule = None
            return True
        if flags & OUTDATED:  # on some rank, so that all reduce again
            self._schedule = None
            flags = self._finish_round()
        if flags & MISSING:
            self._find_present()
        self._schedule = None
        return False

    def wait(self) -> None:
        """Blocks until no communication is in flight and all weights are up to date."""
        self._queue.wait_all()
        for bucket in self._fused.buckets:
            bucket.wait()

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        """Starts the reduce-scatters that wait for the gradient of ``parameter``."""
        if not self._is_syncing():
            return
        self._order.gradient_is_ready(parameter)
        if not self._fused.buckets or self._tuner.change_due:
            return  # the first step observes; new buckets come after this pass
        bucket = self._fused.index_of.get(id(parameter))
        if bucket is not None:  # otherwise no optimizer has it any more
            schedule = self._schedule or self._begin()
            self._start(schedule.gradient_is_ready(bucket))

    def _finish_round(self, flag: int = 0) -> int:
        """Blocks until all buckets are reduced; returns the union of all ranks' flags, to which it adds ``flag``."""
        schedule = self._schedule or self._begin()
        self._start(schedule.finish())
        missing = not all(all(bucket.present) for bucket in self._fused.buckets)
        flag |= MISSING * missing | OUTDATED * schedule.outdated | END_OF_TRIAL * self._tuner.end_of_trial()
        exchanged = self._queue.submit("flags", lambda: self._transport.exchange_flags(flag))
        self._queue.wait_all()
        flags = functools.reduce(operator.or_, exchanged.wait())
        if flags & END_OF_TRIAL:
            self._tuner.change_due = True
        return flags

    def _begin(self) -> BackPipeSchedule:
        """Begins the schedule of a backward pass."""
        self.wait()
        self._schedule = BackPipeSchedule([bucket.num_gradients for bucket in self._fused.buckets])
        return self._schedule

    def _start(self, indices: range) -> None:
        for index in indices:
            self._fused.buckets[index].reduce_scatter(self._queue)
            for bucket, pieces in self._eager.after(index):
                bucket.gather_early(self._queue, pieces)

    def _find_present(self) -> None:
        """Finds the parameters that have a gradient on some rank; the others are not updated, as in DDP."""
        flags = [present for bucket in self._fused.buckets for present in bucket.present]
        somewhere = iter(self._transport.union(flags).wait())
        for bucket in self._fused.buckets:
            bucket.present = [next(somewhere) for _ in bucket.present]
