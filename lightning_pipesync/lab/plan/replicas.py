"""How ranks hold the model that is planned for: each a replica, or several one that FSDP2 shards among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.lab.bench.candidates import sharded
from lightning_pipesync.lab.bench.models import BenchModel


@dataclass(frozen=True)
class Replicas:
    """The replicas of a model; with a ``mesh`` FSDP2 shards each among the ranks of its second dimension."""

    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, ranks_per_replica: int, device: str = "cpu") -> Replicas:
        """Returns replicas of so many neighboring ranks; a collective call.

        Raises:
            ValueError: the ranks do not form two or more replicas.
        """
        return cls() if ranks_per_replica == 1 else cls(device_mesh(ranks_per_replica, device))

    @property
    def number(self) -> int:
        return dist.get_world_size() if self.mesh is None else int(self.mesh.size(0))

    @property
    def ranks_per_replica(self) -> int:
        return 1 if self.mesh is None else int(self.mesh.size(1))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard; None: all ranks."""
        return None if self.mesh is None else self.mesh.get_group(0)

    @property
    def between(self) -> DeviceMesh | None:
        """The dimension of the mesh along which methods run."""
        return None if self.mesh is None else self.mesh["replicas"]

    @property
    def within(self) -> DeviceMesh | None:
        """The dimension of the mesh along which FSDP2 shards."""
        return None if self.mesh is None else self.mesh["shards"]

    @property
    def arguments(self) -> dict[str, Any]:
        """What a method gets besides its settings."""
        return {} if self.mesh is None else {"replicas": self.between}

    def sharded(self, model: BenchModel) -> BenchModel:
        """Returns the model, sharded by its layers, if it is to be."""
        return model if self.mesh is None else sharded(model, self.mesh["shards"])

    def as_shard(self, values: Tensor) -> Tensor:
        """Returns this rank's shard ``values`` of a tensor that is divided as the model is."""
        return values if self.mesh is None else DTensor.from_local(values, self.mesh["shards"], [Shard(0)])


#: Each rank has a whole model.
EACH_RANK = Replicas()


def device_mesh(ranks_per_replica: int, device: str = "cpu") -> DeviceMesh:
    """Returns the mesh of all ranks, replicas of neighboring ones, with ``replicas`` and ``shards``; a collective call.

    Raises:
        ValueError: the ranks do not form two or more replicas.
    """
    replicas, rest = divmod(dist.get_world_size(), ranks_per_replica)
    if rest or replicas < 2:
        raise ValueError(
            f"ranks_per_replica={ranks_per_replica} does not divide {dist.get_world_size()} ranks into two or more "
            "replicas: start a rank for each device with torchrun."
        )
    return init_device_mesh(device, (replicas, ranks_per_replica), mesh_dim_names=("replicas", "shards"))


def bytes_by_group(module: nn.Module) -> list[int]:
    """Returns the bytes of this rank's shards in each group of FSDP2's; none of a module that is not sharded."""
    found, taken = [], set[int]()
    for child in reversed([child for child in module.modules() if isinstance(child, FSDPModule)]):
        shards = [local_of(p) for p in child.parameters() if id(p) not in taken]
        taken |= {id(p) for p in child.parameters()}
        found.append(sum(shard.numel() * shard.element_size() for shard in shards))
    return [num_bytes for num_bytes in found if num_bytes]
