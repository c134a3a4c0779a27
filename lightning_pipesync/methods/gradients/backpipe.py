"""BackPipe (DeAR, Section III-B): the collectives of gradients start under the backward pass.

A bucket's collective, a reduce-scatter or a whole all-reduce, starts as soon as its gradients are ready.

[Note: one order on all ranks]
Ranks must issue the same operations in the same order, also where their graphs, and with them the order of their
gradients, differ. So the order is fixed for all ranks when the buckets are made, from what rank 0 has observed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.parameters import hook_gradient
from lightning_pipesync.methods.gradients.bucket import GradientBucket

# Bits of a rank's flag: a parameter has no gradient; a gradient has changed after the collective of its bucket started.
# Methods add their own bits.
MISSING, OUTDATED = 1, 2


class BackPipeSchedule:
    """Which collectives start in one backward pass, as its gradients become ready.

    The collective of a bucket starts when all of its gradients are ready and all earlier ones have started, see
    [Note: one order on all ranks]. ``num_gradients`` is the number of gradients that the pass computes, by bucket. The
    first ``num_started`` collectives have started; ``outdated`` is whether a gradient has changed after its own did.
    """

    def __init__(self, num_gradients: Sequence[int]) -> None:
        self._num_awaited = list(num_gradients)
        self.num_started = 0
        self.outdated = False

    def gradient_is_ready(self, bucket: int) -> range:
        """Returns the buckets whose collective starts, now that a gradient of ``bucket`` is ready."""
        if bucket < self.num_started:
            self.outdated = True
            return range(0)
        self._num_awaited[bucket] -= 1
        begin = self.num_started
        while self.num_started < len(self._num_awaited) and self._num_awaited[self.num_started] <= 0:
            self.num_started += 1
        return range(begin, self.num_started)

    def finish(self) -> range:
        """Returns the buckets whose collective starts at the end, because gradients are missing."""
        begin, self.num_started = self.num_started, len(self._num_awaited)
        return range(begin, self.num_started)


class BackPipe:
    """Reduces the gradients of all buckets, once a step, whichever gradients this rank has.

    Attributes:
        buckets: in the order of their collectives; they may change between passes, or in ``before_first``.
        index_of: the index of a parameter's bucket, by the parameter's id.

    Args:
        may_start: returns whether a pass starts collectives, now that the gradient of a parameter is ready.
        before_first: called before the first collective of a step; may return an operation that has to complete before
            any.
        started: called with the index of a bucket whose collective was queued.
        outdated: called when a pass changes a gradient whose collective has started; if allowed, all are reduced again.
        were_written: returns whether a gradient has changed since its collective started, other than by a pass that
            starts any.
    """

    def __init__(
        self,
        queue: CommQueue,
        *,
        may_start: Callable[[Tensor], bool],
        before_first: Callable[[], Queued[Any] | None] = lambda: None,
        started: Callable[[int], None] = lambda index: None,
        outdated: Callable[[], None] = lambda: None,
        were_written: Callable[[], bool] = lambda: False,
    ) -> None:
        self.buckets: Sequence[GradientBucket] = ()
        self.index_of: Mapping[int, int] = {}
        self._queue, self._may_start, self._before_first = queue, may_start, before_first
        self._started, self._outdated, self._were_written = started, outdated, were_written
        self._schedule: BackPipeSchedule | None = None  # of this step
        self._requires: Queued[Any] | None = None
        self._hooks: dict[int, RemovableHandle] = {}
        self._streams: set[torch.cuda.Stream] = set()  # on which this step has computed gradients

    @property
    def in_step(self) -> bool:
        return self._schedule is not None

    def hook_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Registers the gradient hooks of ``parameters``, once."""
        for parameter in parameters:
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = hook_gradient(parameter, self._gradient_is_ready)

    def remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def start_rest(self) -> None:
        """Starts the collectives that have not started in this step."""
        for index in (self._schedule or self._begin()).finish():
            self._reduce(index)

    def end_step(self) -> bool:
        """Ends a step; returns whether a gradient has changed after the collective of its bucket started."""
        outdated = self._schedule is not None and self._schedule.outdated
        self._schedule = self._requires = None
        self._streams.clear()
        return outdated

    def finish(self, exchange: Callable[[int], Queued[list[int]]], flag: int = 0, unless: int = 0) -> int:
        """Blocks until all gradients of this step are reduced; a collective call that returns the union of flags.

        ``exchange`` queues an exchange of flags, given this rank's, to which ``flag`` adds the method's bits. With the
        bits ``unless``, changed gradients are not reduced again.
        """
        flags = self._finish_pass(exchange, flag)
        if flags & OUTDATED and not flags & unless:  # on some rank, so that all reduce again
            flags = flags & ~(MISSING | OUTDATED) | self._finish_pass(exchange, 0)
        return flags

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        """Starts the collectives that wait for the gradient of ``parameter``."""
        if self._may_start(parameter):
            bucket = self.index_of.get(id(parameter))
            if bucket is not None:  # otherwise no optimizer has it any more
                schedule = self._schedule or self._begin()
                if parameter.is_cuda:
                    self._streams.add(torch.cuda.current_stream(parameter.device))
                for index in schedule.gradient_is_ready(bucket):
                    self._reduce(index)
                if schedule.outdated:
                    self._outdated()

    def _finish_pass(self, exchange: Callable[[int], Queued[list[int]]], flag: int) -> int:
        self.start_rest()
        missing = not all(all(bucket.present) for bucket in self.buckets)
        flag |= MISSING * missing | OUTDATED * (self._were_written() | self.end_step())
        exchanged = exchange(flag)
        self._queue.wait_all()
        return functools.reduce(operator.or_, exchanged.wait())

    def _begin(self) -> BackPipeSchedule:
        self._requires = self._before_first()
        self._schedule = BackPipeSchedule([bucket.num_gradients for bucket in self.buckets])
        return self._schedule

    def _reduce(self, index: int) -> None:
        for stream in self._streams:  # layers that ran on other streams have their gradients there
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.buckets[index].reduce(self._queue, self._requires)
        self._started(index)
