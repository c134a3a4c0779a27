"""How a strategy divides all ranks: into replicas, and the ranks of each by the dimensions of a device mesh."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import Self

from lightning_pipesync.methods.setting_types import checked
from lightning_pipesync.methods.settings import Settings

#: The dimensions of the mesh, from the slow network to the fast one. The last two are those of Lightning's
#: ModelParallelStrategy, so that what is written for its mesh finds them here.
REPLICAS = "replicas"
DIMENSIONS = (REPLICAS, "data_parallel", "tensor_parallel")


@dataclass(frozen=True)
class ReplicaLayout:
    """The sizes of the device mesh; what a strategy takes besides its method's settings.

    Raises:
        ValueError: a size is not a positive integer, or the sizes do not divide each other.
    """

    ranks_per_replica: int = 1
    """Number of neighboring ranks that hold a replica of a sharded model together, such as those of a host. With more
    than one, the strategy makes a device mesh ("replicas", "data_parallel", "tensor_parallel"), by which the model is
    to be sharded, and synchronizes along "replicas"."""

    tensor_parallel_size: int = 1
    """Number of neighboring ranks of a replica that get the same batches: the size of "tensor_parallel" in the mesh.
    It must divide ``ranks_per_replica``; the quotient is the size of "data_parallel"."""

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in fields(self):
            object.__setattr__(self, field.name, checked(field.name, types[field.name], getattr(self, field.name)))
        for name in ("ranks_per_replica", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}.")
        _check_divides("tensor_parallel_size", self.tensor_parallel_size, self.ranks_per_replica, "ranks_per_replica=")

    @classmethod
    def taken_from(cls, arguments: dict[str, Any], config_type: type[Settings]) -> dict[str, Any]:
        """Removes the fields from a strategy's arguments, and returns them; settings of the method stay."""
        settings = {field.name for field in fields(config_type)}
        own = [field.name for field in fields(cls) if field.name not in settings]
        return {name: arguments.pop(name) for name in own if name in arguments}

    @classmethod
    def of(cls, config: Settings, taken: dict[str, Any]) -> Self:
        """Returns the layout of what was :meth:`taken_from` the arguments, and of the method's settings."""
        settings = {field.name for field in fields(config)}
        return cls(
            **{field.name: getattr(config, field.name) for field in fields(cls) if field.name in settings} | taken
        )

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Returns a mesh of all ranks, whose dimensions are :data:`DIMENSIONS`; a collective call.

        Raises:
            ValueError: ``ranks_per_replica`` does not divide the number of ranks.
        """
        world_size, size = dist.get_world_size(), self.ranks_per_replica
        _check_divides("ranks_per_replica", size, world_size, "the number of ranks, ")
        sizes = (world_size // size, size // self.tensor_parallel_size, self.tensor_parallel_size)
        return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)

    def place_of_data(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns a rank's place among those that divide the data, and their number."""
        return rank // self.tensor_parallel_size, world_size // self.tensor_parallel_size


def _check_divides(name: str, size: int, number: int, of: str) -> None:
    if number % size:
        possible = ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
        raise ValueError(f"{name}={size!r} does not divide {of}{number}: set one of {possible}.")
