"""What ranks hold of weights that must be the same on all of them, compared by checksums.

[Note: a bit that changed]
A bit that changes in a rank's memory, or in a message, makes ranks train different weights from then on, without a
word. So they are compared each time that they are consolidated, before a checkpoint can be written: by 8 bytes of each
rank. Only if these differ, the ranks exchange the checksums of all parameters.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.faults.errors import mark_as_naming
from lightning_pipesync.core.fingerprints import checksums_of, digest

REMEDY = (
    "Has your code written to weights, on some ranks alone, or on all without synchronize() before? Otherwise ranks "
    "round differently (other processors, or with low_rank another number of threads), or a bit has changed in memory "
    "or in a message: resume from the last checkpoint. Memory with ECC corrects bits."
)


class DifferentWeightsError(RuntimeError):
    """Ranks that must hold the same weights do not."""


@dataclass(frozen=True)
class HeldWeights:
    """What a rank holds of the weights.

    Args:
        rank: in the default process group.
        host: its name.
        pid: of the rank's process.
        part: its part of the model: only ranks with the same one must hold the same.
        names: of the parameters.
        sums: their checksums.
    """

    rank: int
    host: str
    pid: int
    part: int
    names: list[str]
    sums: list[int]

    @classmethod
    def of_this_process(cls, rank: int, named: Sequence[tuple[str, Tensor]], part: int = 0) -> HeldWeights:
        names = [name for name, _ in named]
        return cls(rank, socket.gethostname(), os.getpid(), part, names, checksums_of([tensor for _, tensor in named]))

    @property
    def digest(self) -> bytes:
        """8 bytes, of all sums in their order."""
        return bytes.fromhex(digest(self.sums))[:8]

    @property
    def described(self) -> str:
        return f"{self.rank} (host {self.host}, pid {self.pid})"


def check_held(job: Objects, held: HeldWeights, among: Collectives, beside: Collectives | None = None) -> None:
    """Compares what ranks hold; a collective call of all ranks of the job.

    Args:
        job: of all ranks.
        held: by this one.
        among: the ranks that must hold the same.
        beside: one rank of each other group of such ranks; None: there are none.

    Raises:
        DifferentWeightsError: on every rank: they differ. It names the ranks that hold others than most, and a
            parameter.
    """
    differ = len(set(among.exchange_digests(held.digest))) > 1
    if beside is not None:
        differ = any(beside.exchange_flags(differ).wait())
    if differ and (text := difference(job.gather_objects(held))):
        raise mark_as_naming(DifferentWeightsError(text))


def difference(of_ranks: Sequence[HeldWeights]) -> str:
    """Returns in words how ranks differ, and what to do; an empty text if they do not."""
    for part in sorted({held.part for held in of_ranks}):
        members = [held for held in of_ranks if held.part == part]
        sums = [tuple(held.sums) for held in members]
        if len(set(sums)) > 1:
            first = next(i for i, values in enumerate(zip(*sums, strict=True)) if len(set(values)) > 1)
            name, (usual, number) = members[0].names[first], Counter(sums).most_common(1)[0]
            most = [held for held in members if tuple(held.sums) == usual]
            others = [held for held in members if held not in most]
            if 2 * number <= len(members):
                return (
                    f"The ranks hold different weights, first in parameter {name}, whose checksum is another one: "
                    f"{_in_words(members, first)}. {REMEDY}"
                )
            listed = ", ".join(held.described for held in others)
            who = f"Rank {listed} is at fault: its" if len(others) == 1 else f"Ranks {listed} are at fault: their"
            return (
                f"{who} weights differ from those of rank {', '.join(str(held.rank) for held in most)}, first in "
                f"parameter {name} (checksums: {_in_words([*others, most[0]], first)}). {REMEDY}"
            )
    return ""


def _in_words(members: Sequence[HeldWeights], parameter: int) -> str:
    return "; ".join(f"rank {held.described} has {held.sums[parameter] % 2**64:016x}" for held in members)
