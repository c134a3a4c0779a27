"""The section of a checkpoint with the states of the ranks, and the checks before a rank resumes from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_pipesync.core.rng import rng_states
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.settings import Settings

#: The key of that section, which holds everything that a plain checkpoint does not.
CHECKPOINT_KEY = "pipesync"


def section_of(
    name: str, config: Settings, transport: Transport, state: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Returns the section under :data:`CHECKPOINT_KEY`, on rank 0 with the states of all ranks; a collective call.

    Args:
        name: the method's name.
        config: the method's settings.
        transport: communicates with the other ranks.
        state: returns this rank's state.
    """
    section: dict[str, Any] = {"strategy": name, "world_size": transport.world_size}
    if config.checkpoint_replicas:
        section["ranks"] = dict(enumerate(transport.collect_states(state()) or []))
    return section


def rank_state(methods: dict[str, Any], precision: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the state that this rank needs, besides a plain checkpoint, to resume bit for bit.

    Args:
        methods: states of the methods.
        precision: state of the precision plugin, the rank's own loss scale; may be empty.
        device: the device whose random state is included.
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
    """Returns the state of a rank from the section under :data:`CHECKPOINT_KEY`.

    Rank 0 warns if the checkpoint is of another strategy, or if something is lost with this number of ranks.

    Args:
        saved: the section.
        strategy: name of the strategy that resumes.
        rank: the rank that resumes.
        world_size: number of ranks that resume.
        config: settings of the strategy that resumes.
        removable: what a user may remove from the checkpoint to resume without the states of the ranks.

    Returns:
        The state; None if the checkpoint does not hold one, or the rank cannot use it.

    Raises:
        ValueError: the checkpoint was written with another number of ranks, and can be resumed with that one only.
    """
    if saved["strategy"] != strategy:
        _warn_once(
            rank,
            f"The checkpoint is of strategy={saved['strategy']!r}. Training resumes with {strategy!r} "
            "from its consolidated weights; the states of its ranks are not used.",
        )
        return None
    if saved["world_size"] != world_size:
        if config.needs_as_many_ranks:
            raise ValueError(
                f"The checkpoint holds the state of {saved['world_size']} ranks, and there are {world_size}. "
                f"Resume with as many, or remove {removable} from the checkpoint to resume from its consolidated "
                "weights."
            )
        if (lost := config.lost_with_other_ranks) is not None:
            _warn_once(rank, f"The checkpoint is of {saved['world_size']} ranks, and there are {world_size}: {lost}.")
        return None
    return saved["ranks"][rank] if "ranks" in saved else None


def _warn_once(rank: int, message: str) -> None:
    """Warns on rank 0 only."""
    if rank == 0:
        warnings.warn(message, stacklevel=4)
