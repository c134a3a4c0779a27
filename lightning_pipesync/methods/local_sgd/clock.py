"""Local SGD: when which fragment of the weights is averaged, and among whom. Nothing here communicates.

One rank does in a step (DiLoCo, Algorithm 1; Streaming DiLoCo, Algorithm 2)::

    update the weights                              # the inner optimizer
    for fragment whose average is due: replace its weights by the agreed ones, or blend both
    for fragment in the next rounds.started(step), in turn: start to average its weights
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """The rounds of the fragments. In each period a fragment is averaged once, at equal distances from the others.

    Attributes:
        period: H, in steps.
        fragments: number of fragments.
    """

    period: int
    fragments: int = 1

    def started(self, step: int) -> int:
        """Returns how many fragments' averages start at the end of a step: the next ones in turn.

        Args:
            step: from 1 on, without those of the warm-up. That of the last fragment starts at the end of a period.
        """
        return self._started_until(step) - self._started_until(step - 1)

    def _started_until(self, step: int) -> int:
        # The first is due after a share 1 / fragments of the period, rounded down, but not before the first step.
        periods, within = divmod(step, self.period)
        of_this = sum(0 < (f + 1) * self.period // self.fragments <= within for f in range(self.fragments))
        return periods * self.fragments + of_this


def number_of_participants(participation: float, world_size: int) -> int:
    """Returns how many ranks' weights are averaged, C of FedAvg times their number; 0 if that is less than one."""
    return 1 if world_size == 1 else int(participation * world_size + 1e-9)


def participants(number: int, world_size: int, round_: int) -> list[int]:
    """Returns the ranks whose weights are averaged in a round, the same on all ranks, drawn anew in each.

    Args:
        number: of participants.
        world_size: of ranks.
        round_: the number of the round, which is the seed.
    """
    return sorted(random.Random(round_).sample(range(world_size), number))


def in_fragments(sizes: list[int], fragments: int) -> list[list[int]]:
    """Divides layers, in their order, into fragments of about the same number of bytes.

    Args:
        sizes: of the layers, in bytes; at least ``fragments`` of them.
        fragments: the number of fragments.

    Returns:
        The indices of each fragment's layers, at least one.
    """
    total, passed = sum(sizes), 0
    divided: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        left = len(sizes) - index
        full = passed + size / 2 > total * len(divided) / fragments
        if divided[-1] and len(divided) < fragments and (full or left == fragments - len(divided)):
            divided.append([])
        divided[-1].append(index)
        passed += size
    return divided
