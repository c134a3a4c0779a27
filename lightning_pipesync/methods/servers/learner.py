"""A learner: pushes its gradients, and receives weights."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.servers.messages import WeightsMessage
from lightning_pipesync.methods.servers.policies import Gradient
from lightning_pipesync.methods.servers.shards import SharedBucket


class Learner:
    """This rank's weights, and what the servers send of them.

    Attributes:
        rank: this rank.
        version: of the weights that this rank has.
        ahead: the updates by which they were predicted from that version.
        steps: the number of steps that it has taken.
        newest: the newest version that it knows of.

    Args:
        buckets: the parameters.
        num_servers: the number of servers.
        transport: names the rank at fault if the weights do not arrive.
        timeout_s: the most seconds to wait for weights.
        moves: whether this rank's weights move away from those that it has received.
        is_patient: whether to wait for longer, as long as all others live and none has ended.
    """

    def __init__(
        self,
        buckets: Sequence[SharedBucket],
        num_servers: int,
        transport: Transport,
        timeout_s: float,
        moves: bool = False,
        is_patient: bool = False,
    ) -> None:
        self.rank = transport.rank
        self.version = self.steps = self.newest = 0
        self.ahead = 0.0
        self._buckets, self._num_servers, self._moves = buckets, num_servers, moves
        self._transport, self._timeout_s, self._is_patient = transport, timeout_s, is_patient
        self._arrived: dict[int, tuple[WeightsMessage, list[Tensor] | None]] = {}  # by server
        self._changed = threading.Condition()
        self._answers: defaultdict[type, deque[Any]] = defaultdict(deque)  # by kind
        self._error: BaseException | None = None

    def next_gradient(self, optimizer: int) -> Gradient:
        """Returns the description of the gradient of the next step, which is one of the optimizer of that index."""
        self.steps += 1
        return Gradient(self.rank, self.steps, self.version, optimizer, self.ahead)

    def take(self, server: int, weights: WeightsMessage, values: list[Tensor] | None) -> None:
        """Takes weights from a server, by a thread of the mail; None: this rank has them."""
        with self._changed:
            self._arrived[server] = (weights, values)
            self._changed.notify_all()

    def answer(self, kind: type, answer: Any) -> None:
        """Takes what this rank has asked for, by a thread of the mail."""
        with self._changed:
            self._answers[kind].append(answer)
            self._changed.notify_all()

    def await_answer(self, kind: type, what: str) -> Any:
        """Waits for the next answer of a kind, ``what`` in words; returns it.

        Raises:
            RuntimeError: a peer is lost.
        """
        answers = self._answers[kind]
        self._await(lambda: bool(answers), what)
        return answers.popleft()

    def fail(self, error: BaseException) -> None:
        """Makes waiting for weights raise an error, from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def bound_waits(self) -> None:
        """Makes a wait last ``timeout_s`` from now at most, by a thread of the mail: a peer has ended."""
        with self._changed:
            self._is_patient = False
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error that has ended the training, if there is one."""
        if self._error is not None:
            raise self._error

    def await_weights(self) -> None:
        """Waits for the weights that this rank has asked for, and copies them into the parameters.

        Raises:
            RuntimeError: a peer is lost.
        """
        if self._receive() or self._moves:
            for bucket in self._buckets:
                bucket.unpack()

    def await_pull(self) -> None:
        """Waits for what the center is to move a replica by, and subtracts that from the parameters.

        Raises:
            RuntimeError: a peer is lost.
        """
        self._receive()
        for bucket in self._buckets:
            bucket.subtract()

    def _receive(self) -> bool:
        """Waits for values of all servers, and takes them into the buckets; returns whether there are new ones."""
        self._await_arrival()
        for server, (weights, values) in self._arrived.items():
            self.version, self.ahead = weights.version, weights.ahead
            for bucket, shard in zip(self._buckets, values or (), strict=False):
                if weights.are_differences:
                    bucket.receive_difference(server, shard)
                else:
                    bucket.receive(server, shard)
        are_new = any(values is not None for _, values in self._arrived.values())
        self.newest = max(self.newest, self.version)
        self._arrived.clear()
        return are_new

    def drop_weights(self) -> None:
        """Waits for the weights that this rank has asked for, and leaves the parameters as they are.

        Raises:
            RuntimeError: a peer is lost.
        """
        self._await_arrival()
        self._arrived.clear()

    def _await_arrival(self) -> None:
        self._await(lambda: len(self._arrived) == self._num_servers, "the weights of the parameter servers")

    def _await(self, arrived: Callable[[], bool], what: str) -> None:
        transport = self._transport
        with transport.traffic.waiting("weights"), transport.watch.waiting(what), self._changed:
            self._changed.wait_for(lambda: not self._is_patient or self._error is not None or arrived())
            in_time = self._changed.wait_for(lambda: self._error is not None or arrived(), self._timeout_s)
        self.check()
        if not in_time:
            silent = RuntimeError(f"nothing for {self._timeout_s:g} s")
            raise transport.watch.accuse(what, None, silent)
