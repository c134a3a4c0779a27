"""The messages of a rank: what it sends to others, and who gets what arrives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.parameter_server.algorithm import Decision, Gradient
from lightning_pipesync.methods.parameter_server.config import ParameterServerConfig
from lightning_pipesync.methods.parameter_server.coordinator import Coordinator
from lightning_pipesync.methods.parameter_server.learner import Learner
from lightning_pipesync.methods.parameter_server.messages import (
    Ask,
    Batch,
    Buffers,
    Dismissed,
    Push,
    StepSettings,
    Sums,
    Weights,
    Wish,
)
from lightning_pipesync.methods.parameter_server.server import Pushed, Server

#: The rank that takes the decisions; it is a server, too.
COORDINATOR = 0


class Correspondence:
    """Carries what learners, servers and the coordinator tell each other.

    Args:
        transport: the way to the other ranks.
        config: the settings.
        learner: this rank's.
    """

    def __init__(self, transport: Transport, config: ParameterServerConfig, learner: Learner) -> None:
        self._rank, self._world_size = transport.rank, transport.world_size
        self._config, self._learner = config, learner
        self._num_servers = config.num_servers(transport.world_size)
        self._watch, self._mail = transport.watch, transport.mail()
        self.send = self._mail.send

    def start(self, coordinator: Coordinator, server: Server | None) -> None:
        """Starts to send and to receive; ``server`` is this rank's, if it is one."""
        self._coordinator, self._server = coordinator, server
        self._mail.start(self._deliver, self._lose, self._end)

    def close(self, timeout_s: float) -> None:
        """Ends the threads, after all messages are delivered or after ``timeout_s`` seconds."""
        self._watch.close()  # first: what this rank ends is nobody's fault
        self._mail.close(timeout_s)

    # --- what a learner sends ---------------------------------------------------------------------------------------

    def tell(self, wish: Wish) -> None:
        """Tells the coordinator what this learner wants."""
        self.send(COORDINATOR, (wish,))

    def ask(self, loader: int, epoch: int, num_batches: int, to_each: bool) -> int | None:
        """Returns the number of a loader's next batch of an epoch with so many; None when there is no more."""
        self.send(COORDINATOR, (Ask(loader, epoch, num_batches, to_each),))
        return self._learner.await_batch()

    def push(
        self,
        gradient: Gradient,
        settings: StepSettings,
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

    def send_weights(self, rank: int, weights: Weights, values: list[Tensor] | None) -> None:
        """Sends this server's shards to a learner; None: it has them."""
        self.send(rank, (weights, values))

    def send_sums(self, sums: Sums, part: Tensor) -> None:
        """Sends this server's part of sums to all servers."""
        for server in range(self._num_servers):
            self.send(server, (sums, part))

    def send_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Sends rank 0's buffers to all other ranks."""
        for rank in range(1, self._world_size):
            self.send(rank, (Buffers(), list(buffers)))

    # --- what arrives -----------------------------------------------------------------------------------------------

    def _deliver(self, rank: int, message: Any) -> None:
        """Takes a message, by a thread of the mail."""
        what, *rest = message
        if isinstance(what, Push | Wish | Ask):
            if not self._coordinator.dismisses(rank):
                self._serve(rank, what, *rest)
        elif isinstance(what, Dismissed):
            self._learner.fail(self._dismissal())
        elif isinstance(what, Batch):
            self._learner.take_batch(what.number)
        elif isinstance(what, Weights):
            self._learner.take(rank, what, *rest)
        elif isinstance(what, Buffers):
            self._learner.take_buffers(*rest)
        elif isinstance(what, Sums):
            assert self._server is not None
            self._server.take_sums(rank, what, *rest)
        else:
            self._follow(what, *rest)

    def _serve(self, rank: int, what: Push | Wish | Ask, *rest: Any) -> None:
        """Takes what a learner wants."""
        if isinstance(what, Push):
            assert self._server is not None
            self._server.push(rank, what.gradient.step, Pushed(*rest))
            if what.settings is not None:
                self._coordinator.push(what.gradient, what.settings)
        elif isinstance(what, Wish):
            self._coordinator.grant(rank, what)
        else:
            self._coordinator.hand_out(rank, what)

    def _follow(self, decision: Decision, settings: StepSettings | None) -> None:
        """Takes a decision of the coordinator."""
        if decision.update is not None:
            self._learner.newest = max(self._learner.newest, decision.update.version)
        if decision.skip is not None:
            self._learner.take_skip(decision.skip)
        elif self._server is not None:
            self._server.follow(decision, settings)

    def _lose(self, rank: int, error: Exception) -> None:
        """Takes the loss of a rank, by a thread of the mail."""
        if not self._config.goes_on or rank == COORDINATOR:
            self._learner.fail(error)
            return
        self._watch.go_on_without(rank)
        if self._rank == COORDINATOR:
            left = [learner for learner in self._coordinator.learners if learner != rank]
            with suppress(UserWarning):  # where warnings are errors
                warnings.warn(
                    f"Lost rank {rank} after {self._learner.newest} updates: rank {', '.join(map(str, left))} "
                    f"{'go' if len(left) > 1 else 'goes'} on without it. {error}",
                    stacklevel=2,
                )
            self._coordinator.lose(rank)

    def _end(self, rank: int) -> None:
        """Takes that a rank has ended without an error, by a thread of the mail; all may have ended their parts."""
        if not self._config.goes_on:
            self._learner.bound_waits()
        elif self._rank == COORDINATOR:
            self._coordinator.lose(rank)

    def _dismissal(self) -> RuntimeError:
        return RuntimeError(
            f"Rank {self._rank} was not heard of in time, and counts as lost "
            f"(timeout_s={self._config.timeout_s:g}): the others went on without it. End this process."
        )
