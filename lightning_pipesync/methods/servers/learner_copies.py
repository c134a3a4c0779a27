"""What the learners have of a server's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.comm.mail import Letter
from lightning_pipesync.methods.servers.messages import Decision, Gradient, WeightsMessage


class LearnerCopies:
    """What each learner has of a server's shards of the weights: ``values`` at first.

    Nothing is sent twice. With a lossy ``codec`` the learners get encoded differences. Both sides add what is decoded,
    so that the error of a difference is part of the next one, and weights that do not change any more are approached.
    ``keeps_fetched`` keeps the weights that gradients are computed at (DC-ASGD, Algorithm 2, w_bak).
    """

    def __init__(self, values: Sequence[Tensor], codec: Codec, keeps_fetched: bool) -> None:
        self._codec, self._keeps_fetched = codec, keeps_fetched
        self._first = [value.clone() for value in values] if keeps_fetched or not codec.lossless else []
        self._last: dict[int, WeightsMessage] = {}  # by learner, without values
        self._now: dict[int, list[Tensor]] = {}  # by learner, if the codec is lossy
        self._fetched: dict[int, dict[tuple[int, float], list[Tensor]]] = {}  # by learner, version, and updates ahead
        self._newest: Letter | None = None  # with the newest weights, for all learners that need them

    def message_for(
        self, rank: int, version: int, decision: Decision, predict: Callable[[], list[Tensor]]
    ) -> WeightsMessage | Letter:
        """Returns the message to a released learner; ``predict`` returns weights, which must not change afterwards."""
        last = self._last.get(rank)
        # Weights that were predicted from the same version are not predicted again.
        is_current = last is not None and (last.version, bool(last.ahead)) == (version, bool(decision.ahead))
        if last is not None and is_current and not (decision.whole and last.are_differences):
            return last
        newest = self._newest_weights(version, decision.ahead, predict)
        values, letter = newest.message.values, newest
        if not (self._codec.lossless or decision.whole):
            letter = Letter(WeightsMessage(version, decision.ahead, True, self._encode(rank, values)))
            values = self.of(rank)
        elif not self._codec.lossless:
            self._now[rank] = [value.clone() for value in values]
        if self._keeps_fetched:
            self._fetched.setdefault(rank, {})[version, decision.ahead] = values
        self._last[rank] = replace(letter.message, values=None)
        return letter

    def forget_last(self, rank: int) -> None:
        """Call this if a learner's weights are no longer those of the last message."""
        self._last.pop(rank, None)

    def computed_at(self, gradient: Gradient) -> list[Tensor]:
        """Returns the weights at which a gradient was computed; drops older ones of its learner."""
        fetched = self._fetched.setdefault(gradient.rank, {})
        for older in [key for key in fetched if key[0] < gradient.version]:
            del fetched[older]
        return fetched.get((gradient.version, gradient.ahead), self._first)

    def of(self, rank: int) -> list[Tensor]:
        """Returns a copy of what a learner has, if the codec is lossy."""
        return [value.clone() for value in self._now.get(rank, self._first)]

    def _newest_weights(self, version: int, ahead: float, predict: Callable[[], list[Tensor]]) -> Letter:
        newest = self._newest
        if newest is None or (newest.message.version, newest.message.ahead) != (version, ahead):
            newest = self._newest = Letter(WeightsMessage(version, ahead, False, predict()))
        return newest

    @torch.no_grad()
    def _encode(self, rank: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns, for each shard, the encoded difference from what a learner has: 1-D, uint8."""
        now = self._now.setdefault(rank, [first.clone() for first in self._first])
        wires = []
        for has, value in zip(now, values, strict=True):
            wires.append(
                torch.empty(self._codec.wire_bytes(has.numel(), has.dtype), dtype=torch.uint8, device=has.device)
            )
            self._codec.encode(value - has, wires[-1])
            self._codec.decode_add(wires[-1], has, has.dtype)
        return wires
