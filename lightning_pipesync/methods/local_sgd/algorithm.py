"""Local SGD: when which fragment of the weights is averaged, and among whom. Nothing here communicates.

One rank does in a step (DiLoCo, Algorithm 1; Streaming DiLoCo, Algorithm 2)::

    update the weights                              # the inner optimizer
    for fragment in rounds.applied(step): replace its weights by the agreed ones, or blend both
    for fragment in rounds.started(step): start to average its weights
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
        overlap_steps: tau, the steps from the start of an average to its application, ``period`` at most.
    """

    period: int
    fragments: int = 1
    overlap_steps: int = 0

    def started(self, step: int) -> list[int]:
        """Returns the fragments whose average starts at the end of a step.

        Args:
            step: from 1 on, without those of the warm-up. That of the last fragment starts at the end of a period.
        """
        return [f for f in range(self.fragments) if step % self.period == self._offset(f)]

    def applied(self, step: int) -> list[int]:
        """Returns the fragments whose average is applied at the end of a step, before others start."""
        return self.started(step - self.overlap_steps) if step > self.overlap_steps else []

    def _offset(self, fragment: int) -> int:
        return (fragment + 1) * self.period // self.fragments % self.period


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
