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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_pipesync.core.comm.mail import Letter
from lightning_pipesync.core.held_weights import difference
from lightning_pipesync.data.work_queue import WorkQueue
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import (
    Answer,
    BatchRequest,
    Decision,
    Flushed,
    Gradient,
    Push,
    PushArrived,
    Refused,
    Request,
    Update,
    UpdateSettings,
)
from lightning_pipesync.methods.servers.policies import Sequencer

#: The coordinator's rank, or that of the first one. It is a server, too.
COORDINATOR = 0


class Coordinator:
    """Calls the sequencer with what arrives from ``learners``, and sends its decisions to ``followers`` in their order.

    Threads of the mail call its methods. ``num_reporting`` other servers report what arrives, see
    [Note: incomplete gradients].
    """

    def __init__(
        self,
        sequencer: Sequencer,
        send: Callable[[int, Any], object],
        learners: Iterable[int],
        followers: Sequence[int],
        config: ParameterServerConfig,
        num_reporting: int = 0,
    ) -> None:
        self.log: list[Update] = []  # all updates so far, with ``keep_log=True``
        self._sequencer, self._send, self._followers, self._config = sequencer, send, followers, config
        self._queue = WorkQueue(learners)
        self._lost: set[int] = set()
        self._sent: defaultdict[int, deque[Gradient | Request]] = defaultdict(deque)  # by learner, not yet used
        self._num_reporting = num_reporting
        self._reports: Counter[Gradient] = Counter()  # the number of other servers that have it
        self._settings: dict[Gradient, UpdateSettings] = {}  # of the pushed gradients
        self._reloading: set[int] = set()  # the ranks that retire because they have loaded weights or states
        self._same: set[int] = set()  # the ranks that got the same weights last, and are not lost
        self._flushed: dict[int, Flushed] = {}  # by those of them that have told what they have
        self._closed = threading.Event()
        self._in_grace_after = -1  # the version that the latest period of grace follows
        self._lock = threading.Lock()

    @property
    def mean_staleness(self) -> float:
        return self._sequencer.staleness_lr.mean

    def deliver(self, rank: int, message: Push | PushArrived | Request | BatchRequest | Flushed) -> None:
        """Takes what a rank has sent, or a server tells of it; ignored if that rank has just been lost."""
        with self._lock:
            match message:
                case PushArrived(gradient) if gradient.rank in self._lost:
                    self._decide([Decision(dropped=gradient)])
                case PushArrived(gradient):
                    self._reports[gradient] += 1
                    self._take(gradient.rank)
                case _ if rank in self._lost:
                    pass
                case Push(gradient, settings):
                    assert settings is not None
                    self._settings[gradient] = settings
                    self._take(rank, gradient)
                case Request():
                    self._take(rank, message)
                case BatchRequest():
                    self._hand_out(rank, message)
                case Flushed():
                    self._flushed[rank] = message
                    self._answer_if_all_flushed()

    def forget_rank(self, rank: int) -> None:
        """Marks a rank as lost: no decision waits for it, and it is notified, as it may only be frozen."""
        with self._lock:
            self._lost.add(rank)
            self._reloading.discard(rank)
            self._same.discard(rank)
            self._flushed.pop(rank, None)
            self._send(rank, self._eviction_of(rank))
            incomplete = {message for message in self._sent.pop(rank, ()) if isinstance(message, Gradient)}
            incomplete |= {gradient for gradient in self._reports if gradient.rank == rank}
            for gradient in incomplete:
                self._reports.pop(gradient, None)
            dropped = [Decision(dropped=gradient) for gradient in sorted(incomplete, key=lambda one: one.step)]
            self._decide([*dropped, *self._sequencer.lose(rank)])
            self._answer_if_all_flushed()

    def is_evicted(self, rank: int) -> bool:
        """Returns whether a rank counts as lost, and if so notifies it."""
        with self._lock:
            lost = rank in self._lost
        if lost:
            self._send(rank, self._eviction_of(rank))
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

    def _take(self, rank: int, *messages: Gradient | Request) -> None:
        """Calls the sequencer with what a learner has sent, up to a gradient that some server does not have yet."""
        sent = self._sent[rank]
        sent.extend(messages)
        while sent:
            match sent[0]:
                case Gradient() as gradient:
                    if self._reports[gradient] < self._num_reporting:
                        return
                    del self._reports[gradient]
                    decisions = self._sequencer.push(gradient)
                case Request.FETCH:
                    decisions = self._sequencer.fetch(rank)
                case Request.STEP | Request.SKIP as request:
                    decisions = self._sequencer.check(rank, finite=request is Request.STEP)
                case Request.RETIRE | Request.RELOAD as request:
                    if request is Request.RELOAD:
                        self._reloading.add(rank)
                    decisions = self._sequencer.retire(rank)
            sent.popleft()
            self._decide(decisions)

    def _eviction_of(self, rank: int) -> Refused:
        return Refused(
            f"Rank {rank} was not heard of in time, and counts as lost (timeout_s={self._config.timeout_s:g}): the "
            "others continue without it. End this process."
        )

    def _hand_out(self, rank: int, request: BatchRequest) -> None:
        epoch = request.loader, request.epoch
        if problem := self._queue.problem_of_resumption(epoch, request.num_batches):
            with suppress(UserWarning):  # where warnings are errors
                warnings.warn(problem, stacklevel=2)
        number = self._queue.take(rank, epoch, request.num_batches, request.to_each)
        self._send(rank, Answer("BatchRequest", number))

    def _decide(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if decision.skip is not None:
                for rank in decision.stepping:
                    self._send(rank, Answer("Request", decision.skip))
                continue
            if decision.dropped is not None:
                self._settings.pop(decision.dropped, None)
            if (update := decision.update) is not None:
                used = {gradient: self._settings.pop(gradient) for gradient in update.gradients}
                newest = max(used, key=lambda gradient: (gradient.version, -gradient.rank))
                decision = replace(decision, settings=used[newest])
                if self._config.keep_log:
                    self.log.append(update)
            if decision.whole:
                if self._refuse_partial_reload(decision.released):
                    continue
                self._same = set(decision.released)
            letter = Letter(decision, in_steps=not decision.whole)
            for rank in self._followers:
                if rank not in self._lost:
                    self._send(rank, letter)
        version = self._sequencer.version
        if self._sequencer.in_grace and self._in_grace_after != version:
            self._in_grace_after = version
            threading.Thread(target=self._give_grace, args=(version,), name="pipesync-grace", daemon=True).start()

    def _give_grace(self, version: int) -> None:
        """Makes the update after a version when the period of grace is over, unless it was made meanwhile."""
        if self._closed.wait(self._config.grace_s):
            return
        with self._lock:
            if self._sequencer.in_grace and self._sequencer.version == version:
                self._decide(self._sequencer.end_grace())

    def _answer_if_all_flushed(self) -> None:
        if not self._flushed or self._flushed.keys() != self._same:
            return
        of_ranks = [self._flushed[rank] for rank in sorted(self._flushed)]
        text = difference([flushed.held for flushed in of_ranks])
        buffers = next((flushed.buffers for flushed in of_ranks if flushed.buffers), [])
        letter = Letter(Refused(text) if text else Answer("Flushed", buffers), in_steps=False)
        for rank in self._flushed:
            self._send(rank, letter)
        self._flushed = {}

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
