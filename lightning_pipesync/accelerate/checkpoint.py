"""What ``save_state`` writes for each rank besides what Accelerate does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch


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


def read_rank_states(folder: str | Path, name: str, rank: int, world_size: int, num_methods: int) -> list[Any] | None:
    """Returns the states that :func:`save_rank_states` has written; None if the checkpoint is of another method.

    Raises:
        ValueError: it is of another number of processes, or of other models.
    """
    path = _file(folder, 0)
    if not path.exists():
        return None
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["method"] != name:
        return None
    if saved["world_size"] != world_size:
        raise ValueError(
            f"{folder} was saved by {saved['world_size']} processes, and there are {world_size}: use as many, or "
            f"remove {_file('', 0).name} and its like from it to begin from the weights and the optimizer."
        )
    if len(saved["states"]) != num_methods:
        raise ValueError(
            f"{folder} holds {len(saved['states'])} models that were trained with their optimizers, and "
            f"{num_methods} were prepared: prepare the same ones before load_state()."
        )
    states: list[Any] = torch.load(_file(folder, rank), map_location="cpu", weights_only=True)["states"]
    return states


def without_views(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's state with copies in place of views of a buffer that holds other tensors, too.

    File formats take such views, as fused weights are, for copies of each other. Tied weights stay tied.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == value.nbytes:
            return value
        key = value.data_ptr(), value.shape
        if key not in copies:
            copies[key] = value.clone()
        return copies[key]

    return {name: whole(value) for name, value in state.items()}


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"pipesync_{rank}.bin"
