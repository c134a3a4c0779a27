"""What a checkpoint holds besides a plain one's content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: The key of a checkpoint under which everything stands that a plain one does not have.
CHECKPOINT_KEY = "pipesync"


def state_of_rank(
    saved: Mapping[str, Any],
    strategy: str,
    rank: int,
    world_size: int,
    needs_as_many_ranks: bool,
    warn: Callable[[str], object],
    removable: str = f"the key {CHECKPOINT_KEY!r}",
) -> dict[str, Any] | None:
    """Returns what a rank needs to go on bit for bit, from what stands under :data:`CHECKPOINT_KEY`.

    Args:
        saved: what stands there.
        strategy: name of the strategy that goes on.
        rank: which rank.
        world_size: how many ranks there are now.
        needs_as_many_ranks: whether the run can only go on with as many as before.
        warn: called with a message if another strategy's checkpoint is used.
        removable: what a user may remove from the checkpoint, to go on without it.

    Returns:
        None if the checkpoint does not hold it, or it is not of use here.

    Raises:
        ValueError: the checkpoint was written with another number of ranks.
    """
    if saved["strategy"] != strategy:
        warn(
            f"The checkpoint is of strategy={saved['strategy']!r}. Training goes on with {strategy!r} "
            "from its consolidated weights; what that strategy kept for each rank is not used."
        )
        return None
    if saved["world_size"] != world_size:
        if not needs_as_many_ranks:
            return None
        raise ValueError(
            f"The checkpoint holds the state of {saved['world_size']} ranks, and there are {world_size}. "
            f"Resume with as many, or remove {removable} from the checkpoint to go on from its consolidated weights."
        )
    return saved["ranks"][rank] if "ranks" in saved else None
