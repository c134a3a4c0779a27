"""Gradients that are averaged in each step: in a warm-up (post-local SGD), and in a group that trains one replica."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import hook_gradient
from lightning_pipesync.core.torch_private import version
from lightning_pipesync.methods.gradients.backpipe_schedule import BackPipeSchedule
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.replicas.flags import raise_if_not_all_consolidate, raise_if_not_all_loaded
from lightning_pipesync.methods.replicas.gradients import GradientAggregation
from lightning_pipesync.methods.replicas.groups import exchange_flags

# The bits of a rank's flag: a parameter has no gradient; one has changed after its all-reduce started.
MISSING, OUTDATED = 1, 2

#: The most seconds that the thread is waited for at the end.
CLOSE_S = 1.0


class SynchronousGradients:
    """Averages the gradients of an optimizer in each step, as DDP does: buckets start under the backward pass.

    Before the first all-reduce of a pass the ranks exchange flags. So a rank that does something else meanwhile is
    named, and no all-reduce waits for it.

    Args:
        optimizer: the user's own.
        buckets: its parameters, in the order of the forward pass.
        transport: the way to the other ranks.
        in_group: whether the ranks of a group average them, or all.
        starts_in_pass: returns whether a backward pass starts all-reduces; None: they start after it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[list[Tensor]],
        transport: Transport,
        in_group: bool,
        starts_in_pass: Callable[[], bool] | None,
    ) -> None:
        self._optimizer, self._transport = optimizer, transport
        self._row = transport.row if in_group else None
        self._buckets = list(reversed(buckets))  # the last layers' gradients are ready first
        self._bucket_of = {id(tensor): i for i, bucket in enumerate(self._buckets) for tensor in bucket}
        self._gradients = GradientAggregation(self._buckets, self._row or transport, "none", False)
        self._queue = CommQueue("pipesync-gradients", transport.device, transport.traffic)
        self._schedule: BackPipeSchedule | None = None  # of this backward pass
        self._packed: list[tuple[Tensor, Tensor | None, int]] = []  # parameters, gradients, and the versions of these
        self._begun: Queued[list[int]]
        self._starts_in_pass = starts_in_pass
        tensors = [tensor for bucket in buckets for tensor in bucket] if starts_in_pass else []
        self._hooks = [hook_gradient(tensor, self._gradient_is_ready) for tensor in tensors]

    def average(self) -> None:
        """Replaces every gradient by its average over the ranks; a collective call.

        A missing gradient counts as zero. A gradient that no rank has stays None, as in DDP.

        Raises:
            RuntimeError: the optimizer has got parameters that are not averaged; some rank is about to consolidate the
                weights; or a peer is lost.
        """
        if any(id(p) not in self._bucket_of and p.requires_grad for p in parameters_of(self._optimizer)):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} has got further parameters, whose gradients are not averaged: set "
                f"{'warmup_steps=0' if self._row is None else 'ranks_per_replica=1'}, or add them before the training."
            )
        flags = self._finish_pass()
        if flags & OUTDATED:  # on some rank, so that all average again
            flags = self._finish_pass()
        if flags & MISSING:
            self._gradients.add_missing()
        for index in range(len(self._buckets)):
            self._gradients.unpack(index)

    def drop(self) -> None:
        """Waits for what a pass has started that no step follows; a collective call if there is any."""
        if self._schedule is not None:
            self._finish_pass()

    def close(self) -> None:
        """Ends the thread, and removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._queue.close(CLOSE_S)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        """Starts the all-reduces that wait for the gradient of ``parameter``."""
        if self._starts_in_pass is not None and self._starts_in_pass():
            schedule = self._schedule or self._begin()
            self._start(schedule.gradient_is_ready(self._bucket_of[id(parameter)]))

    def _begin(self) -> BackPipeSchedule:
        """Begins the schedule of a backward pass."""
        self._schedule = BackPipeSchedule([sum(t.requires_grad for t in bucket) for bucket in self._buckets])
        self._begun = self._exchange(0)
        return self._schedule

    def _start(self, indices: range) -> None:
        for index in indices:
            self._gradients.pack(index)
            self._packed += [(p, p.grad, -1 if p.grad is None else version(p.grad)) for p in self._buckets[index]]
            self._queue.submit("all_reduce", functools.partial(self._gradients.start, index), requires=self._begun)

    def _finish_pass(self) -> int:
        """Blocks until all buckets are averaged, and returns the union of all ranks' flags."""
        schedule = self._schedule or self._begin()
        self._start(schedule.finish())
        # By a further backward pass, or by the user's loop, which may write to gradients until it steps.
        changed = any(p.grad is not g or (g is not None and version(g) != known) for p, g, known in self._packed)
        missing = any(gradient is None for _, gradient, _ in self._packed)
        flags = self._exchange(MISSING * missing | OUTDATED * changed)
        self._queue.wait_all()
        self._schedule = None
        self._packed.clear()
        return functools.reduce(operator.or_, flags.wait())

    def _exchange(self, flag: int) -> Queued[list[int]]:
        """Queues an exchange of flags, after which nothing starts if a rank has not come for a step."""
        row, transport = self._row, self._transport
        ranks = (row or transport).ranks

        def exchange() -> Handle[list[int]]:
            if row is not None:
                return row.exchange_flags(flag)
            return Handle(lambda: exchange_flags(transport, flag))

        def check(flags: list[int]) -> None:
            raise_if_not_all_loaded(flags, ranks)
            raise_if_not_all_consolidate(flags, ranks)

        return self._queue.submit("flags", exchange, check)
