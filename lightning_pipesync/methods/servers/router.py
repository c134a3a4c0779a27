"""The message router of a rank: sends messages, waits for answers, and delivers what arrives."""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_pipesync.core.comm.mail import Letter
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.servers.config import Roles
from lightning_pipesync.methods.servers.coordinator import COORDINATOR, Coordinator
from lightning_pipesync.methods.servers.messages import (
    Answer,
    BatchRequest,
    Decision,
    Flushed,
    PartialSums,
    Push,
    PushArrived,
    Refused,
    Request,
    StatesRequest,
    WeightsMessage,
)
from lightning_pipesync.methods.servers.server import Server

#: How many timeouts an answer may take where training survives a loss: one rank may be lost after the other.
LOSSES = 3


class MessageRouter:
    """Carries the messages of learners, servers and the coordinator. A wait raises RuntimeError if a rank is lost."""

    def __init__(self, transport: Transport, roles: Roles, timeout_s: float) -> None:
        self.num_servers, self._survives_loss = roles.num_servers, roles.survives_loss
        self.coordinators = roles.coordinators
        self.newest = 0  # version of the weights that this rank knows of
        self._rank, self._transport, self._timeout_s = transport.rank, transport, timeout_s
        transport.watch.survives_loss = roles.survives_loss
        self._learners = set(roles.learners)  # that have neither ended nor are lost
        self._ended: set[int] = set()  # in order, without whom the others go on
        self._is_patient = self._rank not in self._learners  # a rank that only serves waits while others train
        self._answers: defaultdict[str, deque[tuple[int, Any]]] = defaultdict(deque)  # by what was asked, with ranks
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._mail = transport.mail()
        self.send = self._mail.send

    def start(self, coordinator: Coordinator, server: Server | None, part: Callable[[int], dict[str, Any]]) -> None:
        """Starts the threads; ``part`` returns this server's part of the state of an optimizer, given its index."""
        self._coordinator, self._server, self._part = coordinator, server, part
        self._mail.start(self._deliver, self._lose, self._end)

    def close(self, timeout_s: float) -> None:
        """Ends the threads, after all messages are delivered or after ``timeout_s`` seconds."""
        self._transport.watch.close()  # first, so that no rank is blamed for what this one ends
        self._mail.close(timeout_s)

    # --- requests and answers ---------------------------------------------------------------------------------------

    def request(self, request: Request) -> None:
        letter = Letter(request, in_steps=request not in (Request.RETIRE, Request.RELOAD))
        for rank in self.coordinators:
            self.send(rank, letter)

    def ask(self, message: Any, what: str, ranks: Sequence[int] = (COORDINATOR,)) -> list[Any]:
        """Sends a message to ranks; returns the value of each one's :class:`Answer`; ``what`` is theirs, in errors."""
        letter = Letter(message, in_steps=isinstance(message, BatchRequest))
        for rank in ranks:
            self.send(rank, letter)
        values = self._await(type(message).__name__, what, len(ranks))
        return [values[rank] for rank in ranks]

    def await_weights(self, what: str = "the weights of the parameter servers") -> dict[int, WeightsMessage]:
        """Returns the requested weights by server."""
        return self._await("weights", what, self.num_servers)

    def next_batch(self, loader: int, epoch: int, num_batches: int, to_each: bool) -> int | None:
        """Returns the number of a loader's next batch; None at the end of the epoch."""
        [number] = self.ask(BatchRequest(loader, epoch, num_batches, to_each), "the next batch")
        return number

    def check(self) -> None:
        """Raises the error that has ended training, if any."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Makes this rank's waits and :meth:`check` raise ``error`` from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _await(self, asked: str, what: str, number: int) -> dict[int, Any]:
        """Waits for ``number`` answers of different ranks; returns them by rank."""
        watch, timeout_s = self._transport.watch, self._timeout_s * (LOSSES if self._survives_loss else 1)

        def has_ended() -> bool:
            return self._error is not None or len(self._answers[asked]) >= number

        with self._transport.traffic.waiting("weights"), watch.waiting(what), self._changed:
            self._changed.wait_for(lambda: not self._is_patient or has_ended())
            in_time = self._changed.wait_for(has_ended, timeout_s)
        self.check()
        if not in_time:
            raise watch.failed_wait(what, None, RuntimeError(f"nothing for {timeout_s:g} s"))
        return dict(self._answers[asked].popleft() for _ in range(number))

    # --- what arrives; threads of the mail call these ---------------------------------------------------------------

    def _deliver(self, rank: int, message: Any) -> None:
        server, coordinator = self._server, self._coordinator
        match message:
            case Push() | Request() | Flushed() | BatchRequest() if coordinator.is_evicted(rank):
                pass
            case Push(gradient, settings):
                assert server is not None
                server.push(message)
                if settings is not None:
                    coordinator.deliver(rank, message)
                elif self._survives_loss:  # the coordinator waits for it
                    self.send(COORDINATOR, PushArrived(gradient))
            case PushArrived() | Request() | Flushed() | BatchRequest():
                coordinator.deliver(rank, message)
            case StatesRequest(optimizer):
                self.send(rank, Letter(Answer("StatesRequest", self._part(optimizer)), in_steps=False))
            case PartialSums():
                assert server is not None
                server.add_sums(rank, message)
            case Decision(update):
                if update is not None:
                    self.newest = max(self.newest, update.version)
                if server is not None:
                    server.follow(message)
            case Refused(text):
                self.fail(RuntimeError(text))
            case WeightsMessage():
                self._take_answer("weights", rank, message)
            case Answer(asked, value):
                self._take_answer(asked, rank, value)

    def _take_answer(self, asked: str, rank: int, value: Any) -> None:
        with self._changed:
            self._answers[asked].append((rank, value))
            self._changed.notify_all()

    def _lose(self, rank: int, error: Exception) -> None:
        if rank in self._ended:  # and the system closes its connections
            return
        if not self._survives_loss or rank < self.num_servers or rank == self._rank:
            self.fail(error)
            return
        self._transport.watch.forget_rank(rank)
        self._learners.discard(rank)
        if not self._learners:
            self.fail(error)
        elif self._rank in self.coordinators:
            others = ", ".join(map(str, sorted(self._learners)))
            text = f"Lost rank {rank} after {self.newest} updates: training continues on rank {others}. {error}"
            with suppress(UserWarning):  # where warnings are errors
                if self._rank == COORDINATOR:
                    warnings.warn(text, stacklevel=2)
            self._coordinator.forget_rank(rank)

    def _end(self, rank: int) -> None:
        """A rank has ended without an error; others may end soon."""
        if not self._survives_loss or rank < self.num_servers:
            with self._changed:
                self._is_patient = False
                self._changed.notify_all()
            return
        self._ended.add(rank)
        self._learners.discard(rank)
        self._transport.watch.forget_rank(rank)
        if self._rank in self.coordinators:
            self._coordinator.forget_rank(rank)
