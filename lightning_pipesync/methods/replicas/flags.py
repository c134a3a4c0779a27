"""What the flags of all ranks say, of one byte each, besides what they mean to one policy."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipesync.core.comm.transport import Transport

#: The rank has loaded weights since its last step.
LOADED = 128
#: It is about to consolidate the weights, and takes no step.
CONSOLIDATE = 64


def check_flags(flags: Sequence[int], ranks: Sequence[int] | None = None) -> None:
    """Checks that all ranks have loaded weights, or none, and that all consolidate the weights, or all take a step.

    Args:
        flags: of ``ranks``; None: of all ranks.

    Raises:
        RuntimeError: they differ.
    """

    def only_some(bit: int) -> str:
        chosen = [rank for rank, flag in zip(ranks or range(len(flags)), flags, strict=True) if flag & bit]
        return f"Rank {', '.join(map(str, chosen))}" if 0 < len(chosen) < len(flags) else ""

    if some := only_some(LOADED):
        raise RuntimeError(
            f"{some} has loaded weights since the last step, and the others have not: all ranks have to load the same "
            "ones."
        )
    if some := only_some(CONSOLIDATE):
        raise RuntimeError(
            f"{some} is about to consolidate the weights, for an evaluation or a checkpoint, and the others take a "
            "step: all ranks have to do so together."
        )


def exchange_flags(transport: Transport, flag: int) -> list[int]:
    """All-gathers ``flag``, first in the group of ranks that train one replica, if there are such groups.

    The ranks of a group meet in each step: a rank that consolidates or loads weights alone meets the others there.

    Returns:
        The flags by rank.

    Raises:
        RuntimeError: only some ranks of the group do so; or a peer is lost.
    """
    if transport.row is not None:
        check_flags(transport.row.exchange_flags(flag).wait(), transport.row.ranks)
    return transport.exchange_flags(flag).wait()
