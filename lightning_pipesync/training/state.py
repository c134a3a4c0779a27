"""The section of a checkpoint with the states of the ranks, and the checks before a rank resumes from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import on_all_ranks
from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.rng import rng_states
from lightning_pipesync.methods.settings import Settings

#: The key of that section, which holds everything that a plain checkpoint does not.
CHECKPOINT_KEY = "pipesync"


def section_of(
    name: str, config: Settings, transport: Transport, state: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Returns the section under :data:`CHECKPOINT_KEY`, on rank 0 with all ranks' ``state()``; a collective call."""
    section: dict[str, Any] = {"strategy": name, **layout_of(transport)}
    if config.checkpoint_replicas:
        of_rank = state()
        section["digests"] = dict(enumerate(transport.job.gather_objects(digest(of_rank))))
        section["ranks"] = dict(enumerate(transport.job.collect_states(of_rank) or []))
    return section


def rank_state(methods: dict[str, Any], precision: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the state that this rank needs, besides a plain checkpoint, to resume bit for bit.

    The precision plugin's state, such as this rank's loss scale, may be empty.
    """
    return {**methods, **({"precision": precision} if precision else {}), "rng": rng_states(device)}


def state_of_rank(
    saved: Mapping[str, Any] | None,
    strategy: str,
    transport: Transport | None,
    config: Settings,
    removable: str = f"the key {CHECKPOINT_KEY!r}",
) -> dict[str, Any] | None:
    """Returns the state of this rank from the section under :data:`CHECKPOINT_KEY`; a collective call.

    None, if the checkpoint does not hold one (``saved`` is None, or has no states) or the rank cannot use it: rank 0
    warns if the checkpoint is of another strategy, or if something is lost with this number of ranks. ``removable`` is
    what a user may remove from the checkpoint to resume without the states of the ranks.

    Raises:
        ValueError: on every rank: the state of some rank is damaged; or the checkpoint was written with another number
            of ranks, and can be resumed with that one only.
    """
    job = None if transport is None else transport.job
    rank, present = 0 if job is None else job.rank, layout_of(transport)
    return on_all_ranks(
        job, lambda: None if saved is None else _state_in(saved, strategy, rank, present, config, removable)
    )


def layout_of(transport: Transport | None) -> dict[str, int]:
    """Returns what must be as when a rank's state was saved: the numbers of ranks, and of those of a replica."""
    if transport is None:
        return {"world_size": 1, "ranks_per_replica": 1}
    return {"world_size": transport.job.world_size, "ranks_per_replica": transport.ranks_per_replica}


def _in_words(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Returns two layouts in words: if replicas have one rank in both, it is only the number of ranks."""
    if one["ranks_per_replica"] == other["ranks_per_replica"] == 1:
        return [f"{one['world_size']} ranks", str(other["world_size"])]
    replicas = [(layout["world_size"] // layout["ranks_per_replica"], layout) for layout in (one, other)]
    return [f"{number} x {layout['ranks_per_replica']} ranks (replicas x ranks of each)" for number, layout in replicas]


def _state_in(
    saved: Mapping[str, Any],
    strategy: str,
    rank: int,
    layout: Mapping[str, int],
    config: Settings,
    removable: str,
) -> dict[str, Any] | None:
    if saved["strategy"] != strategy:
        _warn_once(
            rank,
            f"The checkpoint is of strategy={saved['strategy']!r}. Training resumes with {strategy!r} "
            "from its consolidated weights; the states of its ranks are not used.",
        )
        return None
    of_saved = {name: saved[name] for name in layout}
    if of_saved != layout:
        then, now = _in_words(of_saved, layout)
        if config.needs_as_many_ranks:
            raise ValueError(
                f"The checkpoint holds the state of {then}, and there are {now}. "
                f"Resume with as many, or remove {removable} from the checkpoint to resume from its consolidated "
                "weights."
            )
        if (lost := config.lost_with_other_ranks) is not None:
            _warn_once(rank, f"The checkpoint is of {then}, and there are {now}: {lost}.")
        return None
    if "ranks" not in saved:
        return None
    state: dict[str, Any] = saved["ranks"][rank]
    expected = saved["digests"][rank]
    if (found := digest(state)) != expected:
        raise ValueError(
            f"The state of rank {rank} under {removable} is damaged: its digest is {found}, and {expected} was saved. "
            f"Resume from another checkpoint, or remove {removable} to resume from the weights and optimizers alone."
        )
    return state


def _warn_once(rank: int, message: str) -> None:
    if rank == 0:
        warnings.warn(message, stacklevel=5)
