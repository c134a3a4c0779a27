"""The coordinator, on one of the ranks: takes the decisions that all servers follow, and hands out batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pipesync.data.work_queue import WorkQueue
from lightning_pipesync.methods.servers.arrivals import Arrivals
from lightning_pipesync.methods.servers.messages import Ask, Batch, Buffers, Evicted, Request, UpdateSettings
from lightning_pipesync.methods.servers.policies import Decision, Gradient, Sequencer, Update


class Coordinator:
    """Calls the sequencer with what arrives from learners, and sends its decisions in their order.

    Its methods are called by the threads of the mail.

    Attributes:
        log: all updates so far, if they are kept.

    Args:
        sequencer: takes the decisions.
        send: sends a message to a rank.
        learners: the ranks that batches are handed out to.
        followers: the ranks that follow the decisions.
        keep_log: whether to keep the log.
        num_telling: the number of other servers that tell when they have a gradient, see [Note: half a gradient].
    """

    def __init__(
        self,
        sequencer: Sequencer,
        send: Callable[[int, Any], object],
        learners: Iterable[int],
        followers: Sequence[int],
        keep_log: bool,
        num_telling: int = 0,
    ) -> None:
        self.log: list[Update] = []
        self._sequencer, self._send, self._followers, self._keep_log = sequencer, send, followers, keep_log
        self._handed_out = WorkQueue(learners)
        self._num_resumed, self._early = 0, list[tuple[int, Ask]]()  # asks of those who have resumed earlier
        self._lost: set[int] = set()
        self._arrivals = Arrivals(num_telling)
        self._buffers: dict[int, list[Tensor]] = {}  # of the learners that retire
        self._settings: dict[Gradient, UpdateSettings] = {}  # of the pushed gradients
        self._lock = threading.Lock()

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of all gradients so far."""
        return self._sequencer.staleness_lr.mean

    def push(self, gradient: Gradient, settings: UpdateSettings) -> None:
        """Takes a learner's gradient, and the settings of its step; not that of one that has just been lost."""
        with self._lock:
            if gradient.rank in self._lost:
                return
            self._settings[gradient] = settings
            self._take(gradient.rank, gradient)

    def arrived(self, gradient: Gradient) -> None:
        """Takes that another server has a learner's gradient."""
        with self._lock:
            if gradient.rank in self._lost:
                self._decide([Decision(dropped=gradient)])
                return
            self._arrivals.part(gradient)
            self._take(gradient.rank)

    def request(self, rank: int, request: Request) -> None:
        """Takes a learner's request; not that of one that has just been lost."""
        with self._lock:
            if rank not in self._lost:
                self._take(rank, request)

    def keep_buffers(self, rank: int, buffers: list[Tensor]) -> None:
        """Takes the buffers of a learner that retires next; all get the first one's when all have retired."""
        with self._lock:
            if rank not in self._lost:
                self._buffers[rank] = buffers

    def hand_out(self, rank: int, ask: Ask) -> None:
        """Sends a learner the number of its next batch, when what was handed out in an earlier run is known."""
        with self._lock:
            if ask.num_resumed > self._num_resumed:
                self._early.append((rank, ask))
                return
            number = self._handed_out.take(rank, (ask.loader, ask.epoch), ask.num_batches, ask.to_each)
        self._send(rank, (Batch(number),))

    def lose(self, rank: int) -> None:
        """Goes on without a learner."""
        with self._lock:
            self._lost.add(rank)
            self._buffers.pop(rank, None)
            self._send(rank, (Evicted(),))  # it may wake up
            halves = [Decision(dropped=gradient) for gradient in self._arrivals.lose(rank)]
            self._decide([*halves, *self._sequencer.lose(rank)])

    def is_evicted(self, rank: int) -> bool:
        """Returns whether a rank counts as lost, and tells it so: it may only have been silent for too long."""
        with self._lock:
            lost = rank in self._lost
        if lost:
            self._send(rank, (Evicted(),))
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters, while nothing is pending."""
        staleness = self._sequencer.staleness_lr.state_dict()
        return {"staleness": staleness, "handed_out": self._handed_out.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Resumes from what :meth:`state_dict` returned, with weights of a version."""
        with self._lock:
            self._sequencer.version = version
            self._sequencer.staleness_lr.load_state_dict(state["staleness"])
            self._handed_out.load_state_dict(state["handed_out"])
            self._num_resumed += 1
            early, self._early = self._early, []
        for rank, ask in early:
            self.hand_out(rank, ask)

    def _take(self, rank: int, *told: Gradient | Request) -> None:
        """Calls the sequencer with what a learner has told, as far as it is complete."""
        for what in told:
            self._arrivals.tell(rank, what)
        for what in self._arrivals.ready(rank):
            if isinstance(what, Gradient):
                self._decide(self._sequencer.push(what))
            elif what is Request.FETCH:
                self._decide(self._sequencer.fetch(rank))
            elif what is Request.RETIRE:
                self._decide(self._sequencer.retire(rank))
            else:
                self._decide(self._sequencer.check(rank, finite=what is Request.STEP))

    def _decide(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            settings = None
            if decision.dropped is not None:
                self._settings.pop(decision.dropped, None)
            if decision.update is not None:
                used = {gradient: self._settings.pop(gradient) for gradient in decision.update.gradients}
                settings = used[max(used, key=lambda gradient: (gradient.version, -gradient.rank))]  # the newest one's
                if self._keep_log:
                    self.log.append(decision.update)
            for rank in self._followers:
                if rank not in self._lost:
                    self._send(rank, (decision, settings))
            if decision.whole and self._buffers:
                for rank in decision.released:
                    self._send(rank, (Buffers(), self._buffers[min(self._buffers)]))
                self._buffers = {}
