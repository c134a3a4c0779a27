"""Flags of one byte, by which ranks learn what the others are about to do.

[Note: a flag's byte]
A rank sends one where it exchanges a gradient's measure (bits 1 to 32), is about to start an average (its steps modulo
7), to consolidate the weights (64, with its steps modulo 64, or with the bits of a gradient that it has skipped), or
has loaded weights (128). The second never has a bit of :data:`SKIPPED`, and the first always has one: a rank that does
something else than the others is named, and no flag is taken for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipesync.core.comm.transport import Transport

# Of a gradient (SelSync, Algorithm 1, ``flags[n]``):
SYNCHRONIZE = 1  # its relative change is at least delta
MISSING_GRADIENT = 2  # a parameter has no gradient
NOT_FINITE = 4  # the gradient is not finite
SKIPPED = 8, 16  # the rank has skipped an even or an odd number of steps; one of the two is set in every flag
UNDEFINED = 32  # the relative change is not defined: the step is synchronized, and does not update delta

CONSOLIDATE = 64  # the rank is about to consolidate the weights, and takes no step
LOADED = 128  # it has loaded weights since its last step

# What its number of steps is modulo, as it consolidates the weights, and when an average starts: a prime, as the steps
# of policies that disagree mostly differ by a power of two.
STEPS, STEPS_AT_START = 64, 7

_IF_ONLY_SOME = {
    LOADED: "has loaded weights since the last step, and the others have not: all ranks have to load the same ones.",
    CONSOLIDATE: "is about to consolidate the weights, for the end of an epoch, an evaluation or a checkpoint, and the "
    "others take a step: all ranks have to do so together, after the same averages (end_step of a policy of your own "
    "must return the same on all ranks).",
}

SAME_STEPS = "have not taken as many steps: all ranks take a step, or none."
SAME_STARTS = (
    "start an average after different numbers of steps: all ranks must take the same steps, and end_step of their "
    "policy must return the same for each of them."
)


def check_flags(flags: Sequence[int], ranks: Sequence[int] | None = None) -> None:
    """Checks that all of ``ranks`` (None: all ranks) have loaded weights or none, and all consolidate them or none.

    Raises:
        RuntimeError: their flags differ.
    """
    for bit, message in _IF_ONLY_SOME.items():
        chosen = [rank for rank, flag in zip(ranks or range(len(flags)), flags, strict=True) if flag & bit]
        if 0 < len(chosen) < len(flags):
            raise RuntimeError(f"Rank {', '.join(map(str, chosen))} {message}")


def check_same(flags: Sequence[int], what: str, mask: int = 255, ranks: Sequence[int] | None = None) -> None:
    """Calls :func:`check_flags`, and checks that all ``ranks`` have the same bits of ``mask``.

    Raises:
        RuntimeError: some differ from the first's; the message names them, and says ``what`` they and it have done.
    """
    check_flags(flags, ranks)
    by_rank = list(zip(ranks or range(len(flags)), flags, strict=True))  # empty if nothing was exchanged
    if different := [rank for rank, flag in by_rank if flag & mask != flags[0] & mask]:
        raise RuntimeError(f"Rank {', '.join(map(str, different))} and rank {by_rank[0][0]} {what}")


def exchange_flags(transport: Transport, flag: int) -> list[int]:
    """All-gathers ``flag``, by rank; first among the ranks that train one replica, if there are such groups.

    The ranks of a group communicate in each step: a rank that consolidates or loads weights alone meets the others
    there.

    Raises:
        RuntimeError: only some ranks of the group do so; or a peer is lost.
    """
    if transport.row is not None:
        check_flags(transport.row.exchange_flags(flag).wait(), transport.row.ranks)
    return transport.exchange_flags(flag).wait()
