"""How FSDP2 shards the drawn model of a replica."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._pytree import tree_map_only

from tests.fuzz.layers import LAYERS

REPLICAS, SHARDS = "replicas", "shards"

#: Whether FSDP2 can forget a pass that was stopped.
RECOVERS = hasattr(FSDPModule, "reset_iter_state")


@dataclass(frozen=True)
class Sharding:
    """A mesh, and what ``fully_shard`` is told.

    Attributes:
        replicas_first: whether the ranks of a replica are neighbors, as in a mesh with replicas as its first dimension.
        names_replicas: whether the method is told along which dimension of the mesh the model is replicated.
        groups: names of modules that FSDP2 gathers by themselves, from the innermost; the root has the rest.
        columns: whether weights are divided by their columns, where that is even.
        reshard: as ``reshard_after_forward``.
        param_dtype, reduce_dtype, output_dtype: of the policy of mixed precision.
        prefetches: whether each group gathers the next one in advance.
        reduces_passes: whether passes under ``no_sync`` are reduced within the replica, and not only the last one.
    """

    num_replicas: int
    num_shards: int
    replicas_first: bool
    names_replicas: bool
    groups: tuple[str, ...]
    columns: bool
    reshard: bool | int | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    prefetches: bool
    reduces_passes: bool

    def place_of(self, rank: int) -> tuple[int, int]:
        """Returns the replica of a rank, and its place in it."""
        if self.replicas_first:
            return divmod(rank, self.num_shards)
        place, replica = divmod(rank, self.num_replicas)
        return replica, place

    def ranks_of(self, replica: int) -> list[int]:
        """Returns the ranks of a replica, by their place."""
        ranks = range(self.num_replicas * self.num_shards)
        return sorted((rank for rank in ranks if self.place_of(rank)[0] == replica), key=self.place_of)

    def mesh(self) -> DeviceMesh:
        """Returns the mesh of all ranks; a collective call."""
        sizes = {REPLICAS: self.num_replicas, SHARDS: self.num_shards}
        names = tuple(sizes) if self.replicas_first else tuple(reversed(sizes))
        return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shards a model within this rank's replica."""
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        arguments: dict[str, Any] = {"mesh": mesh[SHARDS], "reshard_after_forward": self.reshard, "mp_policy": policy}
        if self.columns:
            arguments["shard_placement_fn"] = self._placement
        for name in self.groups:
            fully_shard(model.get_submodule(name), **arguments)
        fully_shard(model, **{**arguments, "mp_policy": replace(policy, output_dtype=self.output_dtype)})
        ahead = [model.get_submodule(name) for name in self.groups if "branches" not in name]  # which may not run
        for module, following in zip([model, *ahead], ahead, strict=False) if self.prefetches else ():
            module.set_modules_to_forward_prefetch([following])

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        even = parameter.dim() > 1 and parameter.size(1) % self.num_shards == 0
        return Shard(1) if even else None


def draw_sharding(random: Random, layers: tuple[str, ...], num_replicas: int, num_shards: int) -> Sharding:
    """Returns how a model of layers is sharded."""
    kinds = [LAYERS[name] for name in layers]
    share = random.choice([0.0, 0.3, 0.7, 1.0])
    groups = [
        f"blocks.{index}{'.' * bool(inner)}{inner}"
        for index, kind in enumerate(kinds)
        for inner in kind.groups
        if (kind.alone and not inner) or random.random() < share
    ]
    if random.random() < share:
        groups.append("head")
    low = all(kind.in_low_precision for kind in kinds) and random.random() < 0.3
    # A sum of two has one order.
    reduce_dtype = random.choice([None, torch.float32] if num_shards <= 2 else [torch.float32]) if low else None
    parts = [size for size in range(2, num_shards) if num_shards % size == 0]
    return Sharding(
        num_replicas,
        num_shards,
        replicas_first=random.random() < 0.7,
        names_replicas=random.random() < 0.5,
        groups=tuple(groups),
        columns=random.random() < 0.2,
        reshard=random.choice([None, True, False, *parts]),
        param_dtype=torch.bfloat16 if low else None,
        reduce_dtype=reduce_dtype,
        output_dtype=random.choice([None, torch.float32]) if low else None,
        prefetches=random.random() < 0.3,
        # Without a dtype of their reduction, passes would be added in that of the weights.
        reduces_passes=(low and reduce_dtype is None) or random.random() < 0.7,
    )


def whole(tree: Any) -> Any:
    """Returns nested containers with whole tensors in place of DTensors; a call of all ranks of a replica."""
    return tree_map_only(DTensor, lambda value: value.full_tensor(), tree)


def copied(tree: Any) -> Any:
    """Returns nested containers with copies of their tensors."""
    return tree_map_only(Tensor, lambda value: value.detach().clone(), tree)


@dataclass(frozen=True)
class _Part:
    """A shard that can be sent."""

    local: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]


def of_first_replica(tree: Any, mesh: DeviceMesh | None) -> Any:
    """Returns nested containers as the first replica has them, or rank 0 without a mesh; a collective call."""
    parts = tree_map_only(DTensor, lambda one: _Part(one.to_local(), one.shape, one.stride(), one.placements), tree)
    shared = [parts]
    dist.broadcast_object_list(shared, group=mesh and mesh.get_group(REPLICAS), group_src=0)

    def rebuilt(part: _Part) -> Tensor:
        assert mesh is not None
        where = {"shape": part.shape, "stride": part.stride}
        return DTensor.from_local(part.local, mesh[SHARDS], part.placements, run_check=False, **where)

    return tree_map_only(_Part, rebuilt, shared[0])
