"""The phases of a training, in which faults strike, and the gate on which a rank meets them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.comm.messages import Messages
from tests.conformance.training import BATCHES, EPOCHS

if TYPE_CHECKING:
    from tests.drill.case import Strike

STEPS = EPOCHS * BATCHES

#: In the order of a training. ``collective``: a message of the method is about to be sent.
PHASES = ("init", "attach", "forward", "backward", "step", "collective", "flush", "checkpoint", "end")
#: Those of a job that is a replica: ``join``: it is about to join the others.
PHASES_OF_JOBS = ("init", "attach", "join", *PHASES[2:])
WITHIN_STEPS = ("forward", "backward", "step", "collective")
#: Before them no method is attached, so that nothing of this package watches over the ranks.
UNWATCHED = ("init",)


class Gate:
    """On a rank: tells the faults that strike it that their phase has come.

    Attributes:
        step: the number of steps that this rank has begun.
        poisoned: whether the next output of a layer is to be NaN.
        point: where the rank is.
    """

    def __init__(self, rank: int, strikes: Sequence[Strike], connection: Connection) -> None:
        self.rank, self.step, self.poisoned = rank, 0, False
        self._pending = {number: strike for number, strike in enumerate(strikes) if strike.rank == rank}
        self._skip = {number: strike.message for number, strike in self._pending.items()}
        self._connection, self._lock = connection, threading.RLock()
        if any(strike.phase == "collective" for strike in self._pending.values()):
            self._watch_messages()

    def __deepcopy__(self, memo: Any) -> Gate:
        return self  # of a model that is copied

    def passes(self, place: str, who: Any) -> None:
        """Is called at each place that a training of the conformance suite passes."""
        if place == "attach":
            self.watch(who)
        if place == "batch":
            self.step += 1
        if place in ("validation", "saving"):
            self.reach("flush")
        if place in ("attach", "step", "end"):
            self.reach(place)
        if place == "saving":
            self.reach("checkpoint")

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Has faults strike in the forward and backward passes of layers: each stage of a pipeline has some."""
        for layer in layers:
            layer.register_forward_hook(self._pass)

    def _pass(self, layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        self.reach("forward")
        if output.requires_grad:
            output.register_hook(lambda _: self.reach("backward"))
        poisoned, self.poisoned = self.poisoned, False
        return output * math.nan if poisoned else output

    def reach(self, phase: str) -> None:
        """Has the faults strike whose phase this is, and whose step has come."""
        with self._lock:
            for number, strike in list(self._pending.items()):
                early = phase not in ("init", "attach", "join", "end") and self.step <= strike.step
                if strike.phase != phase or early:
                    continue
                if phase == "collective" and self._skip[number]:
                    self._skip[number] -= 1
                    continue
                del self._pending[number]
                self.say(at=number)
                strike.kind.strike(self, number)

    def wait(self) -> None:
        """Waits until the supervisor has done what a fault consists of."""
        self._connection.recv()

    def say(self, **event: Any) -> None:
        """Tells the supervisor what has happened on this rank."""
        with self._lock:
            self._connection.send(event)

    def _watch_messages(self) -> None:
        """Meets each message."""
        send = Messages.start_sending

        def start_sending(messages: Messages, tensor: Tensor, peer: int) -> Any:
            with self._lock:
                self.reach("collective")
            return send(messages, tensor, peer)

        Messages.start_sending = start_sending  # type: ignore[method-assign, assignment]
