"""BackPipe (DeAR, Section III-B): the collectives of gradients start under the backward pass.

A bucket's collective starts as soon as its gradients are ready: a reduce-scatter, or a whole all-reduce. What a bucket
sends is its own affair, and when a pass may start anything is the method's.

[Note: one order on all ranks]
Ranks must issue the same operations in the same order, also where their graphs, and with them the order of their
gradients, differ. So the order is fixed for all ranks when the buckets are made, from what rank 0 has observed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.parameters import hook_gradient
from lightning_pipesync.methods.gradients.bucket import GradientBucket

# The bits of a rank's flag; a method has further ones. A parameter has no gradient; one has changed after the
# collective of its bucket started.
MISSING, OUTDATED = 1, 2

#: Queues an exchange of flags, given this rank's; the result is every rank's.
ExchangeFlag: TypeAlias = Callable[[int], Queued[list[int]]]


class BackPipeSchedule:
    """Which collectives start in one backward pass, as its gradients become ready.

    They start in the order of the buckets, see [Note: one order on all ranks]: that of a bucket when all of its
    gradients are ready and all earlier ones have started.

    Args:
        num_gradients: for each bucket the number of gradients that the backward pass computes.

    Attributes:
        num_started: number of buckets whose collective has started: the first ones.
        outdated: whether a gradient has changed after the collective of its bucket started.
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
        """Returns the buckets whose collective starts at the end: those of which gradients are missing."""
        begin, self.num_started = self.num_started, len(self._num_awaited)
        return range(begin, self.num_started)


class ReducedBuckets(Protocol):
    """All buckets of a model; both properties may change between passes."""

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """In the order of their collectives."""

    @property
    def index_of(self) -> Mapping[int, int]:
        """By the id of a parameter the index of its bucket."""


class BackPipe:
    """Reduces the gradients of all buckets, once a step, whichever gradients this rank has.

    Args:
        fused: the buckets.
        queue: runs the collectives.
        may_start: returns whether a pass starts collectives, now that a parameter's gradient is ready; None: always.
        before_pass: called before the first collective of a step; may return an operation that all of them require.
        after: called when a bucket's collective was queued, with the index of the bucket.
        on_outdated: called when a pass changes a gradient of a bucket whose collective has started; None: at the end of
            the step all are reduced again.
    """

    def __init__(
        self,
        fused: ReducedBuckets,
        queue: CommQueue,
        may_start: Callable[[Tensor], bool] | None = None,
        before_pass: Callable[[], Queued[Any] | None] = lambda: None,
        after: Callable[[int], object] | None = None,
        on_outdated: Callable[[], object] | None = None,
    ) -> None:
        self._fused, self._queue = fused, queue
        self._may_start, self._before_pass = may_start, before_pass
        self._after, self._on_outdated = after, on_outdated
        self._schedule: BackPipeSchedule | None = None  # of this step
        self._requires: Queued[Any] | None = None
        self._hooks: dict[int, RemovableHandle] = {}

    @property
    def in_step(self) -> bool:
        """Whether collectives of this step have started."""
        return self._schedule is not None

    def hook_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Registers the gradient hooks of ``parameters``, once."""
        for parameter in parameters:
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = hook_gradient(parameter, self._gradient_is_ready)

    def remove_hooks(self) -> None:
        """Removes all gradient hooks."""
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
        return outdated

    def finish(
        self,
        exchange: ExchangeFlag,
        flag: int = 0,
        outdated: Callable[[], bool] = lambda: False,
        unless: int = 0,
    ) -> int:
        """Blocks until all gradients are reduced, those of this step and on all ranks; a collective call.

        Args:
            exchange: queues the exchange of flags.
            flag: further bits of this rank's flag.
            outdated: returns whether a gradient has changed, besides by passes that start collectives.
            unless: bits with which changed gradients are not reduced again, since all will be.

        Returns:
            The union of all ranks' flags.

        Raises:
            RuntimeError: a peer is lost.
        """
        flags = self._finish_pass(exchange, flag, outdated)
        if flags & OUTDATED and not flags & unless:  # on some rank, so that all reduce again
            flags = flags & ~(MISSING | OUTDATED) | self._finish_pass(exchange, 0, outdated)
        return flags

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        """Starts the collectives that wait for the gradient of ``parameter``."""
        if self._may_start is None or self._may_start(parameter):
            bucket = self._fused.index_of.get(id(parameter))
            if bucket is not None:  # otherwise no optimizer has it any more
                schedule = self._schedule or self._begin()
                for index in schedule.gradient_is_ready(bucket):
                    self._reduce(index)
                if schedule.outdated and self._on_outdated is not None:
                    self._on_outdated()

    def _finish_pass(
        self, exchange: Callable[[int], Queued[list[int]]], flag: int, outdated: Callable[[], bool]
    ) -> int:
        self.start_rest()
        missing = not all(all(bucket.present) for bucket in self._fused.buckets)
        flag |= MISSING * missing | OUTDATED * (outdated() | self.end_step())
        exchanged = exchange(flag)
        self._queue.wait_all()
        return functools.reduce(operator.or_, exchanged.wait())

    def _begin(self) -> BackPipeSchedule:
        self._requires = self._before_pass()
        self._schedule = BackPipeSchedule([bucket.num_gradients for bucket in self._fused.buckets])
        return self._schedule

    def _reduce(self, index: int) -> None:
        self._fused.buckets[index].reduce(self._queue, self._requires)
        if self._after is not None:
            self._after(index)
