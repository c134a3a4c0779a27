"""The messages of a rank: what it sends to others, and who gets what arrives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.coordinator import Coordinator
from lightning_pipesync.methods.servers.learner import Learner
from lightning_pipesync.methods.servers.messages import (
    Arrived,
    Ask,
    Batch,
    Buffers,
    Evicted,
    OwnBuffers,
    Push,
    Request,
    States,
    StatesWanted,
    Sums,
    UpdateSettings,
    WeightsMessage,
)
from lightning_pipesync.methods.servers.policies import Decision, Gradient
from lightning_pipesync.methods.servers.server import Pushed, Server

#: The rank that takes the decisions; it is a server, too.
COORDINATOR = 0


class MessageRouter:
    """Carries what learners, servers and the coordinator tell each other.

    Attributes:
        num_resumed: how many times this rank has resumed from a saved state.

    Args:
        transport: the way to the other ranks.
        config: the settings.
        learner: this rank's.
    """

    def __init__(self, transport: Transport, config: ParameterServerConfig, learner: Learner) -> None:
        self._rank, self.num_resumed = transport.rank, 0
        self._timeout_s, self._learner = config.timeout_s, learner
        self._num_servers = config.num_servers(transport.world_size)
        self._survives_loss = config.survives_loss(transport.world_size)
        self._learners = set(config.learners(transport.world_size))  # that are not lost
        self._watch, self._mail = transport.watch, transport.mail()
        self.send = self._mail.send

    def start(self, coordinator: Coordinator, server: Server | None, kept: Callable[[int], dict[str, Any]]) -> None:
        """Starts to send and to receive.

        Args:
            coordinator: decides, on rank 0.
            server: this rank's, if it is one.
            kept: returns this server's part of the state of an optimizer, given its index.
        """
        self._coordinator, self._server, self._kept = coordinator, server, kept
        self._mail.start(self._deliver, self._lose, self._end)

    def close(self, timeout_s: float) -> None:
        """Ends the threads, after all messages are delivered or after ``timeout_s`` seconds."""
        self._watch.close()  # first: what this rank ends is nobody's fault
        self._mail.close(timeout_s)

    # --- what a learner sends ---------------------------------------------------------------------------------------

    def tell(self, request: Request) -> None:
        """Tells the coordinator what this learner wants."""
        self.send(COORDINATOR, (request,))

    def ask(self, loader: int, epoch: int, num_batches: int, to_each: bool) -> int | None:
        """Returns the number of a loader's next batch of an epoch with so many; None when there is no more."""
        self.send(COORDINATOR, (Ask(loader, epoch, num_batches, to_each, self.num_resumed),))
        number: int | None = self._learner.await_answer(Batch, "the next batch")
        return number

    def skips(self, finite: bool) -> bool:
        """Returns whether all learners skip a step that they take together: if one has a gradient that is not finite.

        Raises:
            RuntimeError: a peer is lost.
        """
        self.tell(Request.STEP if finite else Request.SKIP)
        skips: bool = self._learner.await_answer(Decision, "the gradients of all ranks")
        return skips

    def tell_buffers(self, buffers: list[Tensor]) -> None:
        """Sends the coordinator the buffers of this learner, which retires next."""
        self.send(COORDINATOR, (OwnBuffers(), buffers))

    def await_buffers(self) -> list[Tensor]:
        """Waits for the buffers that all have when all learners have retired, and returns them.

        Raises:
            RuntimeError: a peer is lost.
        """
        buffers: list[Tensor] = self._learner.await_answer(Buffers, "the buffers of the first learner")
        return buffers

    def states_of(self, optimizer: int) -> list[dict[str, Any]]:
        """Returns by server its part of an optimizer's state, by the name of a parameter; not a collective call.

        Raises:
            RuntimeError: a peer is lost.
        """
        for server in range(self._num_servers):
            self.send(server, (StatesWanted(optimizer),))
        wanted = "the states of the parameter servers' optimizers"
        parts = dict(self._learner.await_answer(States, wanted) for _ in range(self._num_servers))
        return [parts[server] for server in range(self._num_servers)]

    def push(
        self,
        gradient: Gradient,
        settings: UpdateSettings,
        encoded: Callable[[int], list[Tensor]],
        present: list[list[bool]],
    ) -> None:
        """Pushes a gradient to all servers.

        Args:
            gradient: its description.
            settings: of the step.
            encoded: returns what a server gets of it.
            present: for each bucket which parameters have a gradient.
        """
        for server in range(self._num_servers):
            push = Push(gradient, settings if server == COORDINATOR else None)
            self.send(server, (push, encoded(server), present))

    # --- what a server sends ----------------------------------------------------------------------------------------

    def send_weights(self, rank: int, weights: WeightsMessage, values: list[Tensor] | None) -> None:
        """Sends this server's shards to a learner; None: it has them."""
        self.send(rank, (weights, values))

    def send_sums(self, sums: Sums, part: Tensor) -> None:
        """Sends this server's part of sums to all servers."""
        for server in range(self._num_servers):
            self.send(server, (sums, part))

    # --- what arrives -----------------------------------------------------------------------------------------------

    def _deliver(self, rank: int, message: Any) -> None:
        """Takes a message, by a thread of the mail."""
        what, *rest = message
        if isinstance(what, Push | Request | Ask | OwnBuffers):
            if not self._coordinator.is_evicted(rank):
                self._serve(rank, what, *rest)
        elif isinstance(what, Evicted):
            self._learner.fail(self._eviction())
        elif isinstance(what, Batch):
            self._learner.answer(Batch, what.number)
        elif isinstance(what, WeightsMessage):
            self._learner.take(rank, what, *rest)
        elif isinstance(what, Buffers):
            self._learner.answer(Buffers, *rest)
        elif isinstance(what, States):
            self._learner.answer(States, (rank, *rest))
        elif isinstance(what, StatesWanted):
            self.send(rank, (States(), self._kept(what.optimizer)))
        elif isinstance(what, Arrived):
            self._coordinator.arrived(what.gradient)
        elif isinstance(what, Sums):
            assert self._server is not None
            self._server.take_sums(rank, what, *rest)
        else:
            self._follow(what, *rest)

    def _serve(self, rank: int, what: Push | Request | Ask | OwnBuffers, *rest: Any) -> None:
        """Takes what a learner wants."""
        if isinstance(what, Push):
            assert self._server is not None
            self._server.push(rank, what.gradient.step, Pushed(*rest))
            if what.settings is not None:
                self._coordinator.push(what.gradient, what.settings)
            elif self._survives_loss:
                self.send(COORDINATOR, (Arrived(what.gradient),))
        elif isinstance(what, Request):
            self._coordinator.request(rank, what)
        elif isinstance(what, OwnBuffers):
            self._coordinator.keep_buffers(rank, *rest)
        else:
            self._coordinator.hand_out(rank, what)

    def _follow(self, decision: Decision, settings: UpdateSettings | None) -> None:
        """Takes a decision of the coordinator."""
        if decision.update is not None:
            self._learner.newest = max(self._learner.newest, decision.update.version)
        if decision.skip is not None:
            self._learner.answer(Decision, decision.skip)
        elif self._server is not None:
            self._server.follow(decision, settings)

    def _lose(self, rank: int, error: Exception) -> None:
        """Takes the loss of a rank, by a thread of the mail."""
        if not self._survives_loss or rank < self._num_servers:
            self._learner.fail(error)
            return
        self._watch.forget_rank(rank)
        self._learners.discard(rank)
        if not self._learners:
            self._learner.fail(error)
        elif self._rank == COORDINATOR:
            go_on = (
                f"rank {', '.join(map(str, sorted(self._learners)))} {'go' if len(self._learners) > 1 else 'goes'} on"
            )
            with suppress(UserWarning):  # where warnings are errors
                warnings.warn(
                    f"Lost rank {rank} after {self._learner.newest} updates: {go_on} without it. {error}",
                    stacklevel=2,
                )
            self._coordinator.lose(rank)

    def _end(self, rank: int) -> None:
        """Takes that a rank has ended without an error, by a thread of the mail; all may have ended their parts."""
        if not self._survives_loss or rank < self._num_servers:
            self._learner.bound_waits()
        elif self._rank == COORDINATOR:
            self._coordinator.lose(rank)

    def _eviction(self) -> RuntimeError:
        return RuntimeError(
            f"Rank {self._rank} was not heard of in time, and counts as lost "
            f"(timeout_s={self._timeout_s:g}): the others went on without it. End this process."
        )
