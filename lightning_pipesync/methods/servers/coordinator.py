"""The coordinator, on rank 0: takes the decisions that all servers follow, and hands out batches.

With independent shards each server has a coordinator, which takes the decisions for its shard; that on rank 0 hands out
batches, and compares the weights.

[Note: incomplete gradients]
A learner may be lost when some servers have its gradient and others do not, and an update by that gradient would never
end. So where training survives the loss of a learner, all servers report to the coordinator what arrives. A gradient
counts once all of them have it, and whatever its learner sends later waits for that.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_pipesync.core.held_weights import HeldWeights, difference
from lightning_pipesync.data.work_queue import WorkQueue
from lightning_pipesync.methods.servers.messages import (
    Batch,
    BatchRequest,
    Decision,
    Evicted,
    FlushedBuffers,
    Gradient,
    Refused,
    Request,
    SameWeights,
    Update,
    UpdateSettings,
)
from lightning_pipesync.methods.servers.policies import Sequencer

#: The coordinator's rank, or that of the first one. It is a server, too.
COORDINATOR = 0


class Coordinator:
    """Calls the sequencer with what arrives from ``learners``, and sends its decisions to ``followers`` in their order.

    Threads of the mail call its methods. ``num_reporting`` other servers report what arrives, see
    [Note: incomplete gradients]. A period of grace takes ``grace_s`` seconds.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        send: Callable[[int, Any], object],
        learners: Iterable[int],
        followers: Sequence[int],
        keep_log: bool,
        num_reporting: int = 0,
        grace_s: float = 0.0,
    ) -> None:
        self.log: list[Update] = []  # all updates so far, with ``keep_log``
        self._sequencer, self._send, self._followers, self._keep_log = sequencer, send, followers, keep_log
        self._queue = WorkQueue(learners)
        self._num_resumed, self._early = 0, list[tuple[int, BatchRequest]]()  # what ranks ask that have resumed earlier
        self._lost: set[int] = set()
        self._arrivals = _Arrivals(num_reporting)
        self._buffers: dict[int, list[Tensor | None]] = {}  # of the learners that retire
        self._reloading: set[int] = set()  # the ranks that retire because they have loaded weights or states
        self._settings: dict[Gradient, UpdateSettings] = {}  # of the pushed gradients
        self._same: set[int] = set()  # the ranks that got the same weights last, and are not lost
        self._held: dict[int, HeldWeights] = {}  # by those of them that have told
        self._grace_s, self._closed = grace_s, threading.Event()
        self._in_grace_after = -1  # the version that the latest period of grace follows
        self._lock = threading.Lock()

    @property
    def mean_staleness(self) -> float:
        return self._sequencer.staleness_lr.mean

    def push(self, gradient: Gradient, settings: UpdateSettings) -> None:
        """A gradient has arrived on this rank; it is ignored if its learner has just been lost."""
        with self._lock:
            if gradient.rank not in self._lost:
                self._settings[gradient] = settings
                self._take(gradient.rank, gradient)

    def arrived(self, gradient: Gradient) -> None:
        """A gradient has arrived on another server."""
        with self._lock:
            if gradient.rank in self._lost:
                self._decide([Decision(dropped=gradient)])
                return
            self._arrivals.parts[gradient] += 1
            self._take(gradient.rank)

    def request(self, rank: int, request: Request) -> None:
        """A learner has sent a request; it is ignored if the learner has just been lost."""
        with self._lock:
            if rank not in self._lost:
                self._take(rank, request)

    def keep_buffers(self, rank: int, buffers: list[Tensor | None]) -> None:
        """Keeps the buffers of a learner that retires next. When all have retired, all get the first one's."""
        with self._lock:
            if rank not in self._lost:
                self._buffers[rank] = buffers

    def compare_weights(self, held: HeldWeights) -> None:
        """Compares what a rank holds, after all have retired, with the others, once all have told."""
        with self._lock:
            if held.rank not in self._lost:
                self._held[held.rank] = held
                self._compare_if_complete()

    def hand_out(self, rank: int, ask: BatchRequest) -> None:
        """Sends a learner the number of its next batch, once this rank knows what an earlier run has handed out."""
        with self._lock:
            if ask.num_resumed > self._num_resumed:
                self._early.append((rank, ask))
                return
            if problem := self._queue.problem_of_resumption((ask.loader, ask.epoch), ask.num_batches):
                with suppress(UserWarning):  # where warnings are errors
                    warnings.warn(problem, stacklevel=2)
            number = self._queue.take(rank, (ask.loader, ask.epoch), ask.num_batches, ask.to_each)
        self._send(rank, Batch(number))

    def forget_rank(self, rank: int) -> None:
        """Marks a rank as lost: no decision waits for it, and it is notified, as it may only be frozen."""
        with self._lock:
            self._lost.add(rank)
            self._buffers.pop(rank, None)
            self._reloading.discard(rank)
            self._same.discard(rank)
            self._held.pop(rank, None)
            self._send(rank, Evicted())
            incomplete = [Decision(dropped=gradient) for gradient in self._arrivals.forget_rank(rank)]
            self._decide([*incomplete, *self._sequencer.lose(rank)])
            self._compare_if_complete()

    def is_evicted(self, rank: int) -> bool:
        """Returns whether a rank counts as lost, and if so notifies it."""
        with self._lock:
            lost = rank in self._lost
        if lost:
            self._send(rank, Evicted())
        return lost

    def close(self) -> None:
        """Ends a period of grace."""
        self._closed.set()

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters, while nothing is pending."""
        return {"staleness": self._sequencer.staleness_lr.state_dict(), "handed_out": self._queue.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Resumes from what :meth:`state_dict` returned, with weights of a version."""
        with self._lock:
            self._sequencer.version, self._in_grace_after = version, -1
            self._sequencer.staleness_lr.load_state_dict(state["staleness"])
            self._queue.load_state_dict(state["handed_out"])
            self._num_resumed += 1
            early, self._early = self._early, []
        for rank, ask in early:
            self.hand_out(rank, ask)

    def _take(self, rank: int, *messages: Gradient | Request) -> None:
        """Calls the sequencer with what a learner has sent, as far as it is complete."""
        for message in self._arrivals.in_order(rank, messages):
            if isinstance(message, Gradient):
                self._decide(self._sequencer.push(message))
            elif message is Request.FETCH:
                self._decide(self._sequencer.fetch(rank))
            elif message in (Request.RETIRE, Request.RELOAD):
                if message is Request.RELOAD:
                    self._reloading.add(rank)
                self._decide(self._sequencer.retire(rank))
            else:
                self._decide(self._sequencer.check(rank, finite=message is Request.STEP))

    def _decide(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if decision.dropped is not None:
                self._settings.pop(decision.dropped, None)
            if (update := decision.update) is not None:
                used = {gradient: self._settings.pop(gradient) for gradient in update.gradients}
                newest = max(used, key=lambda gradient: (gradient.version, -gradient.rank))
                decision = replace(decision, settings=used[newest])
                if self._keep_log:
                    self.log.append(update)
            if decision.whole and self._refuse_partial_reload(decision.released):
                continue
            if decision.whole:
                self._same = set(decision.released)
            for rank in self._followers if decision.skip is None else decision.stepping:
                if rank not in self._lost:
                    self._send(rank, decision)
            if decision.whole and self._buffers:
                for rank in decision.released:
                    self._send(rank, FlushedBuffers(self._buffers[min(self._buffers)]))
                self._buffers = {}
        version = self._sequencer.version
        if self._sequencer.in_grace and self._in_grace_after != version:
            self._in_grace_after = version
            threading.Thread(target=self._give_grace, args=(version,), name="pipesync-grace", daemon=True).start()

    def _give_grace(self, version: int) -> None:
        """Has the update after a version made when the period of grace is over, unless it was made meanwhile."""
        if self._closed.wait(self._grace_s):
            return
        with self._lock:
            if self._sequencer.in_grace and self._sequencer.version == version:
                self._decide(self._sequencer.end_grace())

    def _compare_if_complete(self) -> None:
        if not self._held or self._held.keys() != self._same:
            return
        text = difference([self._held[rank] for rank in sorted(self._held)])
        for rank in self._held:
            self._send(rank, Refused(text) if text else SameWeights())
        self._held = {}

    def _refuse_partial_reload(self, ranks: Sequence[int]) -> bool:
        """Makes all ranks raise, and returns True, if some of those that have retired have loaded a state."""
        reloading, self._reloading = self._reloading, set()
        others = [rank for rank in ranks if rank not in reloading]
        if not reloading or not others:
            return False
        message = (
            f"Weights or an optimizer's state were loaded on rank {', '.join(map(str, sorted(reloading)))} and not on "
            f"rank {', '.join(map(str, others))}: load them on all ranks, before each takes its next step."
        )
        for rank in ranks:
            self._send(rank, Refused(message))
        return True


class _Arrivals:
    """Delivers what each learner sends in its order, see [Note: incomplete gradients]."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._sent: defaultdict[int, deque[Gradient | Request]] = defaultdict(deque)  # by learner
        self.parts: Counter[Gradient] = Counter()  # the number of other servers that have it

    def in_order(self, rank: int, messages: Iterable[Gradient | Request]) -> Iterator[Gradient | Request]:
        """Adds what a learner sends; yields what it has sent, up to a gradient that some server does not have yet."""
        sent = self._sent[rank]
        sent.extend(messages)
        while sent:
            message = sent[0]
            if isinstance(message, Gradient):
                if self.parts[message] < self._num_parts:
                    return
                del self.parts[message]
            yield sent.popleft()

    def forget_rank(self, rank: int) -> list[Gradient]:
        """Forgets a learner that is lost; returns its gradients that only some servers have."""
        incomplete = {message for message in self._sent.pop(rank, ()) if isinstance(message, Gradient)}
        incomplete |= {gradient for gradient in self.parts if gradient.rank == rank}
        for gradient in incomplete:
            self.parts.pop(gradient, None)
        return sorted(incomplete, key=lambda gradient: gradient.step)
