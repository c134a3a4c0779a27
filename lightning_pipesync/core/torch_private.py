"""Private names of torch that several methods need; those that only EA-Pipe needs are with it.

Each is checked before it is set, or read with a default: see :mod:`lightning_pipesync.core.private_names`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.amp.grad_scaler import OptState
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lightning_pipesync.core.private_names import require, with_attributes


class Probe(torch.optim.SGD):
    """Used for checks in place of SGD: creating an SGD wraps its ``step``, and calls the hooks of subclasses twice."""


require(torch, "_disable_dynamo", "_foreach_copy_", "_foreach_mul_", "_foreach_zero_", "_foreach_norm")
require(torch._C._functorch, "maybe_current_level")
require(Tensor, "_version")
require(nn.Module, "_compiled_call_impl")
require(nn.Module(), "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
require(profiler, "_is_profiler_enabled")
require(torch.profiler, "_ExperimentalConfig")
require(dist.ProcessGroupGloo, "_Options") if dist.is_gloo_available() else None
require(multiprocessing, "_set_thread_name")
require(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data")


#: Decorates a function that is not compiled, as ``torch.compiler.disable``, which takes half a second to import.
not_compiled = torch._disable_dynamo


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module or a part of it is compiled: hooks on its submodules would break the graph."""
    return any(
        _is_made_by("torch._dynamo", "OptimizedModule", child) or child._compiled_call_impl is not None
        for child in module.modules()
    )


def has_hooks(module: nn.Module) -> bool:
    """Returns whether ``module`` itself, not its submodules, has forward or backward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


# Each of these is one call on all tensors, of which there may be none.


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach_zero_(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    if tensors:
        torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: list[Tensor], others: list[Tensor], alpha: float) -> None:
    if tensors:
        torch._foreach_add_(tensors, others, alpha=alpha)


def foreach_lerp_(tensors: list[Tensor], others: list[Tensor], weight: float) -> None:
    if tensors:
        torch._foreach_lerp_(tensors, others, weight)


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor as a 0-dim tensor: fp32, or fp64 if one of them is."""
    if not tensors:
        return []
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes <= {torch.float32} or dtypes <= {torch.float64}:
        return list(torch._foreach_norm(tensors, 2))  # 1.5 times as fast as with a dtype
    return list(torch._foreach_norm(tensors, 2, functools.reduce(torch.promote_types, dtypes, torch.float32)))


def in_function_transform() -> bool:
    """Returns whether a transform of ``torch.func`` runs, within which tensors must not get other data."""
    return torch._C._functorch.maybe_current_level() is not None


def profiler_runs() -> bool:
    """Returns whether ``torch.profiler`` runs in this process, on whichever thread it was started."""
    return profiler._is_profiler_enabled


def all_threads() -> Any:
    """Returns the ``experimental_config`` with which ``torch.profiler`` records all threads, not only its own."""
    return torch.profiler._ExperimentalConfig(profile_all_threads=True)


def name_thread(name: str) -> None:
    """Names the calling thread for profilers and debuggers, which see its first 15 characters on Linux."""
    multiprocessing._set_thread_name(name)


def version(tensor: Tensor) -> int:
    """Returns the version counter, which in-place writes that autograd sees increment."""
    return tensor._version


def is_dtensor(tensor: Tensor) -> bool:
    return _is_made_by("torch.distributed.tensor", "DTensor", tensor)


def has_memory(tensor: Tensor) -> bool:
    """Returns False for a tensor on the meta device, and for a fake one, as those that a compiler keeps of a trace."""
    return not tensor.is_meta and not _is_made_by("torch._subclasses.fake_tensor", "FakeTensor", tensor)


def local_tensor(sharded: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor: a view, which autograd does not follow; any other tensor itself."""
    local: Tensor = sharded._local_tensor if is_dtensor(sharded) else sharded  # type: ignore[attr-defined]
    return local


def sharded_like(sharded: Tensor, local: Tensor) -> Tensor:
    """Returns a DTensor with ``local`` as this rank's shard, sharded as the DTensor ``sharded`` is."""
    dtensor: Any = type(sharded.detach())
    return cast(Tensor, dtensor(local, sharded._spec, requires_grad=False))  # type: ignore[attr-defined]


def mesh_beside(sharded: Sequence[Tensor]) -> DeviceMesh | None:
    """Returns the dimension of the root mesh on which none of some DTensors is; None if that is not one.

    Dimensions of one rank do not count beside larger ones: a mesh may have them, and torch's caches may give a DTensor
    the mesh of another one, with the same ranks. Nor do others if a DTensor is on all ranks: Accelerate gives it a mesh
    with a name of its own for them.
    """
    meshes: list[Any] = [tensor.device_mesh for tensor in sharded]  # type: ignore[attr-defined]
    root = meshes[0]._get_root_mesh() if hasattr(meshes[0], "_get_root_mesh") else meshes[0]
    used = {name for mesh in meshes for name in mesh.mesh_dim_names or ()}
    beside = {name: root.size(dim) for dim, name in enumerate(root.mesh_dim_names or ()) if name not in used}
    if any(mesh.size() == root.size() for mesh in meshes):
        beside = {name: size for name, size in beside.items() if size == 1}
    found = [name for name, size in beside.items() if size > 1] or list(beside)
    return root[found[0]] if len(found) == 1 else None


def reshard(module: nn.Module) -> None:
    """Frees the whole parameters that FSDP2 has gathered, so that the modules have their DTensors again."""
    for child in module.modules():
        if _is_made_by("torch.distributed.fsdp", "FSDPModule", child):
            child.reshard()  # type: ignore[operator]


def gathered_by(module: nn.Module) -> list[Tensor]:
    """Returns the DTensors that FSDP2 gathers, or prefetches, before the forward pass of ``module``: of a whole group.

    That is before the hooks of the submodules that register them.
    """
    if not _is_made_by("torch.distributed.fsdp", "FSDPModule", module):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    require(state, "_states_to_forward_prefetch")
    states = [state, *state._states_to_forward_prefetch]
    return [member.sharded_param for one in states for group in _groups_of(one) for member in group.fsdp_params]


class FullySharded(NamedTuple):
    """A parameter that FSDP2 has sharded.

    ``ranks`` are those that get different data, in the order of the mesh; ``offloaded``: it is on the host.
    """

    parameter: Tensor
    ranks: list[int]
    offloaded: bool


def fully_sharded(module: nn.Module) -> list[FullySharded]:
    """Returns the parameters that FSDP2 has sharded."""
    found = []
    for child in module.modules():
        if _is_made_by("torch.distributed.fsdp", "FSDPModule", child):
            for group in _groups_of(child._get_fsdp_state()):  # type: ignore[operator]
                for member in group.fsdp_params:
                    require(member, "sharded_param", "mesh_info", "offload_to_cpu")
                    ranks = member.mesh_info.mesh.mesh.flatten().tolist()
                    found.append(FullySharded(member.sharded_param, ranks, member.offload_to_cpu))
    return found


def within_collectives(module: nn.Module, waiting: Callable[[], AbstractContextManager[object]]) -> ExitStack:
    """Makes the collectives of FSDP2 run within a context, until the stack is closed."""
    watched = ExitStack()
    for child in module.modules():
        if _is_made_by("torch.distributed.fsdp", "FSDPModule", child):
            for group in _groups_of(child._get_fsdp_state()):  # type: ignore[operator]
                require(group, "unshard", "post_backward")
                for name in ("unshard", "post_backward"):
                    watched.enter_context(with_attributes(group, **{name: _within(waiting, getattr(group, name))}))
    return watched


def _within(
    waiting: Callable[[], AbstractContextManager[object]], function: Callable[..., object]
) -> Callable[..., object]:
    def call(*args: Any, **kwargs: Any) -> object:
        with waiting():
            return function(*args, **kwargs)

    return call


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def _is_made_by(module: str, cls: str, value: object) -> bool:
    """Returns whether ``value`` is of a class, whose module takes half a second to import and may not be imported."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], cls))


def has_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Returns whether ``scaler`` has unscaled the gradients of ``optimizer`` since its last update."""
    require(scaler, "_per_optimizer_states")
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


def mark_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Makes ``scaler``, which has unscaled the gradients of ``optimizer``, skip the update and reduce its scale."""
    for found_inf in _found_inf(scaler, optimizer):
        found_inf.fill_(1.0)


def found_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Returns, before ``scaler`` is updated, whether it skips the step of ``optimizer``."""
    return any(bool(found_inf.item()) for found_inf in _found_inf(scaler, optimizer))


def _found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> list[Tensor]:
    require(scaler, "_per_optimizer_states")
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def handles_unscaling(optimizer: Optimizer) -> bool:
    """Returns whether ``optimizer`` unscales gradients within its step, as fused optimizers do."""
    _check_fused()
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@functools.cache
def _check_fused() -> None:
    require(Probe([torch.zeros(1)], fused=True), "_step_supports_amp_scaling")


def mark_stepped(optimizer: Optimizer) -> None:
    """Marks ``optimizer`` as stepped for learning rate schedulers, which warn otherwise."""
    _check_scheduled()
    optimizer._opt_called = True  # type: ignore[attr-defined]


@functools.cache
def _check_scheduled() -> None:
    optimizer = Probe([torch.zeros(1)])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()
    require(optimizer, "_opt_called")


def twin_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> Optimizer:
    """Returns an optimizer of the same class and attributes, with other parameter groups and another state.

    The user's hooks on ``optimizer``, and a scheduler's wrapper of its ``step``, stay with the original.
    """
    require(optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = groups
    twin.state = defaultdict(dict, state)
    return twin


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Returns the nested containers with ``function`` applied to each tensor, in order."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def copy_loader(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> DataLoader[Any]:
    """Returns a shallow copy of ``loader`` with other samplers; persistent worker processes stay with the original."""
    require(loader, "_iterator")
    loader = copy(loader)
    vars(loader).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
    return loader


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Returns the store of ``group``, with keys of its own, on the process's connection.

    A ``clone()`` would open another one, and while it connects, a Gloo connection in the same process may stall.
    """
    return distributed_c10d._world.pg_map[group][1]


def new_gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str, connect: timedelta
) -> dist.ProcessGroup:
    """Returns a Gloo group that ``torch.distributed`` does not know, on the interface that has ``address``.

    If ``GLOO_SOCKET_IFNAME`` is set, it is on that one. It has the methods of a process group. The ranks connect within
    ``connect``; ``timeout`` is that of collectives.

    Raises:
        RuntimeError: a rank does not connect in time.
    """
    gloo: Any = dist.ProcessGroupGloo
    options, by_name = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
    options._timeout = min(connect, timeout)
    device = gloo.create_device(interface=by_name.split(",")[0]) if by_name else gloo.create_device(hostname=address)
    options._devices = [device]
    group: dist.ProcessGroup = gloo(store, rank, size, options)
    gloo._set_default_timeout(group, timeout)
    return group


def address_of(store: dist.Store) -> str | None:
    """Returns ``host:port`` of the server of ``store``; None if it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else None


def time_steps(ddp: DistributedDataParallel) -> None:
    """Makes DDP time each step, and not every 100th; with CUDA every tenth, because the host waits for the timers."""
    ddp._set_ddp_runtime_logging_sample_rate(1 if ddp.device.type == "cpu" else 10)


def ddp_seconds_waited(ddp: DistributedDataParallel) -> float:
    """Returns the seconds by which all-reduces have outlasted their backward passes, from the steps that DDP has timed.

    Those of the last step are not among them.
    """
    data: Any = ddp._get_ddp_logging_data()
    exposed = data.get("avg_backward_comm_time", 0) - data.get("avg_backward_compute_comm_overlap_time", 0)
    return 1e-9 * exposed * data["iteration"]
