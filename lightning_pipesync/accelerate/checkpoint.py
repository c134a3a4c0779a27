"""What ``save_state`` writes for each rank besides what Accelerate does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_pipesync.methods.checkpoint import state_of_rank


class Stateful(Protocol):
    """What has a state on each rank."""

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from it."""


def save_rank_states(folder: str | Path, methods: Sequence[Stateful], name: str, rank: int, world_size: int) -> None:
    """Writes what this rank needs to go on bit for bit, to a file of its own, as Accelerate does with random numbers.

    Args:
        folder: where the checkpoint is.
        methods: in the order in which they were prepared.
        name: of the method.
        rank: of this process.
        world_size: number of processes.
    """
    states = [method.state_dict() for method in methods]
    Path(folder).mkdir(parents=True, exist_ok=True)  # rank 0, which does so, too, may come later
    torch.save({"method": name, "world_size": world_size, "states": states}, _file(folder, rank))


def read_rank_states(
    folder: str | Path, name: str, rank: int, world_size: int, num_methods: int, needs_as_many_ranks: bool
) -> list[Any]:
    """Returns the states that :func:`save_rank_states` has written; none if they are of no use here.

    Raises:
        ValueError: the checkpoint is of other models, or of another number of processes.
    """
    path = _file(folder, rank) if _file(folder, rank).exists() else _file(folder, 0)
    if not path.exists():  # of plain Accelerate
        return []
    saved = torch.load(path, map_location="cpu", weights_only=True)
    states: Any = state_of_rank(
        {"strategy": saved["method"], "world_size": saved["world_size"], "ranks": {rank: saved["states"]}},
        name,
        rank,
        world_size,
        needs_as_many_ranks,
        warnings.warn,
        removable=f"{_file('', 0).name} and its like",
    )
    if states is not None and len(states) != num_methods:
        raise ValueError(
            f"{folder} holds {len(states)} models that were trained with their optimizers, and {num_methods} were "
            "prepared: prepare the same ones before load_state()."
        )
    return states or []


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"pipesync_{rank}.bin"
