"""What a checkpoint holds of each rank besides a plain one's content, and who may resume from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_pipesync.core.rng import rng_states
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.settings import Settings

#: The key of a checkpoint under which everything stands that a plain one does not have.
CHECKPOINT_KEY = "pipesync"


def section_of(
    name: str, config: Settings, transport: Transport, state: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Returns what stands under :data:`CHECKPOINT_KEY`, on rank 0 with the states of all ranks; a collective call.

    Args:
        name: of the method.
        config: its settings.
        transport: the way to the other ranks.
        state: returns this rank's state.
    """
    section: dict[str, Any] = {"strategy": name, "world_size": transport.world_size}
    if config.checkpoint_replicas:
        section["ranks"] = dict(enumerate(transport.collect_states(state()) or []))
    return section


def rank_state(methods: dict[str, Any], precision: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns what this rank needs to resume bit for bit, besides what a plain checkpoint holds.

    Args:
        methods: states of the methods.
        precision: state of the precision plugin: a loss scale of this rank's own; may be empty.
        device: whose random numbers belong to it.
    """
    return {**methods, **({"precision": precision} if precision else {}), "rng": rng_states(device)}


def state_of_rank(
    saved: Mapping[str, Any],
    strategy: str,
    rank: int,
    world_size: int,
    config: Settings,
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
