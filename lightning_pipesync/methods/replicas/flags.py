"""What the flags of all such methods say, of one byte each, besides what they mean to one method."""

from __future__ import annotations

from collections.abc import Sequence

#: The rank has loaded weights since its last step.
LOADED = 128
#: It is about to consolidate the weights, and takes no step.
CONSOLIDATE = 64


def raise_if_not_all_consolidate(flags: Sequence[int], ranks: Sequence[int] | None = None) -> None:
    """Checks that all ranks are about to consolidate the weights, or none.

    Args:
        flags: of the ranks.
        ranks: their numbers; None: those of all ranks.

    Raises:
        RuntimeError: they differ.
    """
    consolidating = [rank for rank, flag in zip(ranks or range(len(flags)), flags, strict=True) if flag & CONSOLIDATE]
    if 0 < len(consolidating) < len(flags):
        raise RuntimeError(
            f"Rank {', '.join(map(str, consolidating))} is about to consolidate the weights, for an evaluation or "
            "a checkpoint, and the others take a step: all ranks have to do so together."
        )


def raise_if_not_all_loaded(flags: Sequence[int], ranks: Sequence[int] | None = None) -> None:
    """Checks that all ranks have loaded weights, or none; arguments as of :func:`raise_if_not_all_consolidate`.

    Raises:
        RuntimeError: they differ.
    """
    loaded = [rank for rank, flag in zip(ranks or range(len(flags)), flags, strict=True) if flag & LOADED]
    if 0 < len(loaded) < len(flags):
        raise RuntimeError(
            f"Rank {', '.join(map(str, loaded))} has loaded weights since the last step, and the others have not: all "
            "ranks have to load the same ones."
        )
