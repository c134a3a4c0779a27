"""Whole states of models that are sharded, in the form of any other model's checkpoint.

What is not sharded passes through unchanged, so callers need not ask.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.comm.exchange import broadcast_fused
from lightning_pipesync.core.dtensors import has_shards, is_sharded, local_of, whole_of
from lightning_pipesync.core.sharding import replicas_of_model
from lightning_pipesync.core.torch_private import is_dtensor, map_tensors
from lightning_pipesync.methods.method import PIECE_MB, parameters_of


def whole_state(owner: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a sharded module, or of its optimizer, with whole tensors on the CPU of rank 0.

    It is empty on the other ranks: a host might not have room for several whole models. A collective call if ``owner``
    is sharded; otherwise ``state`` is returned as it is.
    """
    if not _is_sharded(owner):
        return state

    def whole(value: Any) -> Tensor | None:
        found = value.full_tensor() if is_dtensor(value) else value
        return found.cpu() if first else None

    first = dist.get_rank() == 0
    found: dict[str, Any] = map_tensors(whole, state)
    return found if first else {}


def share_weights(module: nn.Module, replicas: DeviceMesh | None) -> None:
    """Gives all replicas the first one's weights and buffers, each rank its shards; a collective call.

    ``replicas`` is their dimension of the device mesh; None: as the parameters say, or nothing is shared.
    """
    replicas = replicas or replicas_of_model(module)
    if replicas is None:
        return
    parameters = [local_of(parameter) for parameter in module.parameters()]
    broadcast_fused([*parameters, *buffer_reader(module)()], PIECE_MB, replicas.get_group())


def state_of_shards(owner: nn.Module | Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a :func:`whole_state` as ``owner`` loads it: of a sharded one with this rank's shards of the tensors.

    It can be a hook that ``Optimizer.register_load_state_dict_pre_hook`` gets.
    """
    if not _is_sharded(owner):
        return state
    if isinstance(owner, nn.Module):
        present = owner.state_dict()
        return {name: _cut(value, present.get(name)) for name, value in state.items()}
    ids = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = dict(zip(ids, parameters_of(owner), strict=True))

    def cut(index: int, value: Any) -> Any:
        parameter = parameters[index]
        found = _cut(value, whole_of(parameter)) if isinstance(value, Tensor) and value.dim() else value
        return found.to_local() if is_dtensor(found) and not is_dtensor(parameter) else found

    states = {i: {name: cut(i, value) for name, value in of.items()} for i, of in state["state"].items()}
    return {**state, "state": states}


def _is_sharded(owner: nn.Module | Optimizer) -> bool:
    return is_sharded(owner) if isinstance(owner, nn.Module) else has_shards(owner)


def _cut(value: Any, like: Any) -> Any:
    """Returns a whole tensor as a DTensor, sharded as ``like`` is; another value itself."""
    if not is_dtensor(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # takes half a second

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
