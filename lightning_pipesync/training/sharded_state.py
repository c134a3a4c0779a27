"""Whole states of models that FSDP2 has sharded, in the form of any other model's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.comm.exchange import broadcast_fused
from lightning_pipesync.core.dtensors import local_of, whole_of
from lightning_pipesync.core.sharding import replicas_of_model
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.method import PIECE_MB


def whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state of a module or an optimizer with whole tensors, on the CPU of rank 0; a collective call.

    It is empty on the other ranks: a host might not have room for several whole models.
    """

    def whole(value: Tensor) -> Tensor | None:
        found = value.full_tensor() if isinstance(value, DTensor) else value
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


def load_whole_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Loads what :func:`whole_state` has returned, each rank its shards."""
    present = module.state_dict()
    module.load_state_dict({name: _cut(value, present.get(name)) for name, value in state.items()}, strict)


def cut_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's :func:`whole_state` as one of its parameters: this rank's shards, or DTensors."""
    ids = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = dict(zip(ids, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=True))

    def cut(index: int, value: Any) -> Any:
        parameter = parameters[index]
        found = _cut(value, whole_of(parameter)) if isinstance(value, Tensor) and value.dim() else value
        return found.to_local() if isinstance(found, DTensor) and not isinstance(parameter, DTensor) else found

    states = {i: {name: cut(i, value) for name, value in of.items()} for i, of in state["state"].items()}
    return {**state, "state": states}


def _cut(value: Any, like: Any) -> Any:
    """Returns a whole tensor as a DTensor, sharded as ``like`` is; another value itself."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
