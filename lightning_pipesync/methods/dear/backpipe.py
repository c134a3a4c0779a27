"""BackPipe: gradients are reduced under the backward pass (DeAR, Section III-B)."""

from __future__ import annotations

import functools
import itertools
import operator

from torch import Tensor

from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.fused import FusedBuckets
from lightning_pipesync.methods.dear.order import ExecutionOrder
from lightning_pipesync.methods.dear.tuner import FusionTuner

# The bits of a rank's flag: a parameter has no gradient; one has changed after its bucket was launched; rank 0 knows
# which bucket size to try next.
MISSING, OUTDATED, END_OF_TRIAL = 1, 2, 4


class BackPipe:
    """Reduces all buckets once for each backward pass, in one order, whichever gradients this rank has.

    Args:
        buckets: what travels together.
        order: learns in which order gradients become ready.
        queue: on which they travel.
        tuner: knows when other parameters are to travel together.
        transport: the way to the other ranks.
    """

    def __init__(
        self,
        buckets: FusedBuckets,
        order: ExecutionOrder,
        queue: CommQueue,
        tuner: FusionTuner,
        transport: Transport,
    ) -> None:
        self._buckets, self._order, self._queue = buckets, order, queue
        self._tuner, self._transport = tuner, transport
        self._num_launched = 0
        self._reducing = self._outdated = False

    def gradient_is_ready(self, parameter: Tensor, send: bool) -> None:
        """Starts the reduce-scatter of the bucket whose last gradient this is, if ``send``."""
        if not send:
            return
        self._order.is_ready(parameter)
        if not self._buckets or self._tuner.over:  # the first step only watches; new buckets come after this pass
            return
        bucket = self._buckets.with_parameter(parameter)
        if bucket is None:  # no optimizer has it any more
            return
        if not self._reducing:
            self._begin()
        if bucket.launched:  # a further backward pass before the step: what it adds has to be reduced, too
            self._outdated = True
            return
        bucket.num_awaited -= 1
        ready = itertools.takewhile(lambda bucket: bucket.num_awaited <= 0, self._buckets[self._num_launched :])
        self._launch(self._num_launched + len(list(ready)))

    def finish(self) -> None:
        """Blocks until all gradients are averaged, also those of parameters that had none in this pass.

        Raises:
            RuntimeError: a peer is lost.
        """
        flags = self._finish_round()
        if flags & OUTDATED:  # on some rank, so all do it
            self._reducing = False
            flags = self._finish_round()
        if flags & MISSING:
            self._find_present()
        self._reducing = False

    def drain(self) -> None:
        """Waits until nothing is under way, and all weights are up to date."""
        self._queue.wait_all()
        for bucket in self._buckets:
            bucket.wait()

    def forget(self) -> None:
        """Has :meth:`finish` reduce everything anew: the buckets are about to change; a collective call."""
        self._finish_round()  # ranks may have launched different numbers of buckets
        self._reducing = False

    def _finish_round(self) -> int:
        """Blocks until all buckets are reduced, and returns the union of all ranks' flags."""
        if not self._reducing:
            self._begin()
        self._launch(len(self._buckets))
        missing = not all(all(bucket.present) for bucket in self._buckets)
        flag = MISSING * missing | OUTDATED * self._outdated | END_OF_TRIAL * self._tuner.end_of_trial()
        exchanged = self._queue.submit("flags", lambda: self._transport.exchange_flags(flag))
        self._queue.wait_all()
        flags = functools.reduce(operator.or_, exchanged.wait())
        if flags & END_OF_TRIAL:
            self._tuner.over = True
        return flags

    def _begin(self) -> None:
        """Gets all buckets ready for the gradients of a backward pass."""
        self.drain()
        for bucket in self._buckets:
            bucket.expect_gradients()
        self._num_launched, self._reducing, self._outdated = 0, True, False

    def _launch(self, end: int) -> None:
        """Starts the reduce-scatters of the buckets up to ``end``."""
        for bucket in self._buckets[self._num_launched : end]:
            bucket.take_gradients()
            self._queue.submit("reduce_scatter", bucket.start_reducing)
        self._num_launched = max(end, self._num_launched)

    def _find_present(self) -> None:
        """Finds out which parameters have a gradient on some rank; the others are not updated, as in DDP."""
        flags = [present for bucket in self._buckets for present in bucket.present]
        somewhere = iter(self._transport.union(flags).wait())
        for bucket in self._buckets:
            bucket.present = [next(somewhere) for _ in bucket.present]
