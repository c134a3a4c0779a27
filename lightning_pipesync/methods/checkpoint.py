"""What a checkpoint holds besides a plain one's content."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

#: The key of a checkpoint under which everything stands that a plain one does not have.
CHECKPOINT_KEY = "pipesync"


class Resumable(Protocol):
    """What a method's settings say about a run that goes on with another number of ranks."""

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run can only go on with as many ranks as before."""

    @property
    def lost_with_other_ranks(self) -> str | None:
        """What becomes of that which fits as many ranks only, if the run can go on; None: there is nothing."""


def state_of_rank(
    saved: Mapping[str, Any],
    strategy: str,
    rank: int,
    world_size: int,
    config: Resumable,
    removable: str = f"the key {CHECKPOINT_KEY!r}",
) -> dict[str, Any] | None:
    """Returns what a rank needs to go on bit for bit, from what stands under :data:`CHECKPOINT_KEY`.

    Rank 0 warns if another strategy's checkpoint is used, or if something is lost with this number of ranks.

    Args:
        saved: what stands there.
        strategy: name of the strategy that goes on.
        rank: which rank.
        world_size: how many ranks there are now.
        config: the settings of the strategy that goes on.
        removable: what a user may remove from the checkpoint, to go on without it.

    Returns:
        None if the checkpoint does not hold it, or it is not of use here.

    Raises:
        ValueError: the checkpoint was written with another number of ranks, and needs as many.
    """
    if saved["strategy"] != strategy:
        _warn_once(
            rank,
            f"The checkpoint is of strategy={saved['strategy']!r}. Training goes on with {strategy!r} "
            "from its consolidated weights; what that strategy kept for each rank is not used.",
        )
        return None
    if saved["world_size"] != world_size:
        if config.needs_as_many_ranks:
            raise ValueError(
                f"The checkpoint holds the state of {saved['world_size']} ranks, and there are {world_size}. "
                f"Resume with as many, or remove {removable} from the checkpoint to go on from its consolidated "
                "weights."
            )
        if (lost := config.lost_with_other_ranks) is not None:
            _warn_once(rank, f"The checkpoint is of {saved['world_size']} ranks, and there are {world_size}: {lost}.")
        return None
    return saved["ranks"][rank] if "ranks" in saved else None


def _warn_once(rank: int, message: str) -> None:
    """Warns on one rank for all."""
    if rank == 0:
        warnings.warn(message, stacklevel=4)
