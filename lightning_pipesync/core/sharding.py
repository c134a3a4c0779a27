"""How a model is divided among the ranks of a replica, as its parameters say.

[Note: shards and copies]
FSDP2 divides every parameter among ranks that get different data, and reduces the gradients among them. Tensor
parallelism divides some parameters among ranks that get the same data, and leaves others whole: plain tensors, or
DTensors that are replicated. Each of these ranks has a copy, with the same gradient. So what sums over the ranks of a
replica, as norms do, counts a value once for all of its copies; and copies stay equal only if all of their ranks
compute the same, bit for bit: they are in buckets of their own, which hold the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipesync.core.dtensors import LocalShard, is_sharded, local_of
from lightning_pipesync.core.torch_private import (
    FullySharded,
    fully_sharded,
    is_dtensor,
    mesh_beside,
)


def replicas_of_model(module: nn.Module) -> DeviceMesh | None:
    """Returns the dimension of the device mesh along which a sharded model is replicated; None: it is not sharded."""
    sharded = [parameter for parameter in module.parameters() if is_dtensor(parameter)]
    return mesh_beside(sharded) if sharded else None


def groups_of_shards(module: nn.Module) -> list[dist.ProcessGroup]:
    """Returns the process groups among which a model is sharded."""
    meshes = {parameter.device_mesh for parameter in module.parameters() if is_dtensor(parameter)}  # type: ignore[attr-defined]
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def readers_of_model(module: nn.Module) -> Sequence[int] | None:
    """Returns the ranks of this rank's replica that get different data, this one included; None: all of them do."""
    by_fsdp = next(iter(fully_sharded(module)), None)
    if by_fsdp is not None:
        return by_fsdp.ranks
    return [dist.get_rank()] if is_sharded(module) else None


def copies_of(parameter: Tensor) -> int:
    """Returns how many ranks of a replica hold the same values of a parameter, see [Note: shards and copies]."""
    copies: int = getattr(parameter, "_pipesync_copies", 1)
    return copies


def count_copies(tensor: Tensor, copies: int) -> None:
    """Makes :func:`copies_of` return ``copies``."""
    if copies > 1:
        tensor._pipesync_copies = copies  # type: ignore[attr-defined]
    else:
        vars(tensor).pop("_pipesync_copies", None)


def even_numel(parameter: Tensor) -> int:
    """Returns the number of values of a rank's shard if all had as many: the same on all ranks of a replica."""
    if not isinstance(parameter, LocalShard):
        return parameter.numel()
    return -(-parameter.sharded.numel() // _number_of_shards(parameter.sharded))


def place_of(parameter: Tensor) -> tuple[int, ...]:
    """Returns which shard of a parameter a rank has: the same on all ranks of a replica that hold copies."""
    if not isinstance(parameter, LocalShard):
        return ()
    sharded: Any = parameter.sharded
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return tuple(place for place, placement in places if not placement.is_replicate())


def examine_sharding(module: nn.Module, replica: Sequence[int]) -> None:
    """Finds the copies of each parameter, see :func:`copies_of`, among the ranks of a replica.

    Raises:
        ValueError: a parameter is not divided among them in a way whose gradients somebody reduces; it names one.
    """
    named = list(module.named_parameters())
    by_fsdp = {id(sharded.parameter): sharded for sharded in fully_sharded(module)}
    _check_mesh(named, replica)
    _check_fsdp(named, by_fsdp, replica)
    for _, parameter in named:
        shards = _number_of_shards(parameter) if is_dtensor(parameter) else 1
        local = local_of(parameter)
        count_copies(local, len(replica) // shards)
        if isinstance(local, LocalShard):
            local.reduced_by_fsdp = id(parameter) in by_fsdp


def _number_of_shards(sharded: Any) -> int:
    mesh, placements = sharded.device_mesh, sharded.placements
    return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def _ranks_of_mesh(sharded: Any) -> list[int]:
    ranks: list[int] = sharded.device_mesh.mesh.flatten().tolist()
    return ranks


def _check_mesh(named: Sequence[tuple[str, Tensor]], replica: Sequence[int]) -> None:
    """Checks that the parameters' meshes are of the ranks of the replica."""
    sharded = [(name, parameter) for name, parameter in named if is_dtensor(parameter)]
    if len(replica) == 1 and any(len(_ranks_of_mesh(parameter)) > 1 for _, parameter in sharded):
        raise ValueError(
            f"Parameter {sharded[0][0]} is sharded (DTensor), and no replica of it is known: make a device mesh of two "
            "dimensions with names, such as init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicas', 'shards')), "
            "and shard along mesh['shards']; or pass the dimension of the replicas as replicas=."
        )
    if not sharded and len(replica) > 1 and named:
        raise _not_sharded(named[0][0], len(replica))
    ranks: set[int] = set()
    for name, parameter in sharded:
        of_parameter = _ranks_of_mesh(parameter)
        if not set(of_parameter) <= set(replica):
            raise ValueError(
                f"Parameter {name} is on a device mesh of the ranks {of_parameter}, and this rank's replica has the "
                f"ranks {list(replica)}: shard it along other dimensions of the device mesh than that of the replicas, "
                "which the method synchronizes, and not FSDP2."
            )
        ranks.update(of_parameter)
    if sharded and len(ranks) < len(replica):
        raise ValueError(
            f"Parameter {sharded[0][0]} is divided among {len(ranks)} ranks, as all others are, and a replica has "
            f"{len(replica)}: shard along all dimensions of the device mesh but that of the replicas, by fully_shard "
            "or parallelize_module."
        )


def _check_fsdp(named: Sequence[tuple[str, Tensor]], by_fsdp: dict[int, FullySharded], replica: Sequence[int]) -> None:
    """Checks that FSDP2 reduces all gradients among the ranks with different data."""
    first: FullySharded | None = None
    for name, parameter in named:
        sharded = by_fsdp.get(id(parameter))
        if sharded is None:
            if by_fsdp and parameter.requires_grad:
                raise _not_sharded(name, len(replica))
            continue
        if sharded.offloaded:
            raise ValueError(
                f"Parameter {name} is sharded with offload_policy=CPUOffloadPolicy(), whose gradients reach the host "
                "only at the end of the backward pass, after the method has read them: leave offload_policy out of "
                "fully_shard."
            )
        first = first or sharded
        if set(sharded.ranks) != set(first.ranks):
            raise ValueError(
                f"Parameter {name} is divided by fully_shard among the ranks {list(sharded.ranks)}, and others among "
                f"{list(first.ranks)}: use one mesh in all calls of fully_shard."
            )


def _not_sharded(name: str, num_ranks: int) -> ValueError:
    return ValueError(
        f"Parameter {name} is not sharded, and a replica has {num_ranks} ranks: nobody averages its gradient among "
        "them. Shard the root module, too, with fully_shard(model, mesh=mesh['shards']), and pass no ignored_params."
    )
