"""The checker: sees each operation of a thread, and notes which bytes it reads and writes, on which stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.streams import memory, streams
from tests.streams.streams import HOST, LOCK, current_stream, place, reports, wait_on_host

#: Operations that may have tensors of the host and of the device; the host waits for them unless ``non_blocking``.
COPIES = {"copy_", "_foreach_copy_", "_to_copy"}
#: Operations whose result the host reads, so that it waits for the stream.
READ_BY_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"}
#: Operations that read no value of their arguments.
SHAPES_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_")
#: What NCCL carries here; of all communication the first tensors are written to, which the schemas do not say.
COLLECTIVES = {"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "broadcast_", "allreduce_"}
CPU = torch.device("cpu")

#: The groups that stand in for those of NCCL, by name.
nccl_groups: set[str] = set()
_this_thread = threading.local()


@contextmanager
def placing(device: torch.device) -> Iterator[None]:
    """Context in which new tensors are on a device, or on the host, wherever those are that they are made from."""
    before = getattr(_this_thread, "placed", None)
    _this_thread.placed = device
    try:
        yield
    finally:
        _this_thread.placed = before


def device_of(tensor: Tensor) -> torch.device:
    stream = memory.memory_of(tensor).stream
    return CPU if stream is None else stream.device


def is_on_device(tensor: Tensor) -> bool:
    return device_of(tensor) != CPU


class Checker(TorchDispatchMode):
    """Sees the operations of the thread that enters it, and those of backward passes that it starts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name, names, writing = _schema_of(func)
        result = _run_on_copies(func, args) if namespace == "c10d" and _is_over_nccl(args) else func(*args, **kwargs)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        given = [*zip(names, args, strict=False), *kwargs.items()]
        for index, (argument, value) in enumerate(given):
            written = index == 0 and name != "send" if namespace == "c10d" else argument in writing
            (writes if written else reads).extend(_tensors(value))
        if name.startswith("_foreach"):
            increment_version(writes)  # which autograd does unless a mode is active
        with LOCK:
            if namespace == "c10d":
                _note_communication(name, reads, writes, args)
            elif name != "set_":
                non_blocking = any(argument == "non_blocking" and value for argument, value in given)
                _note(name, reads, writes, _tensors(result), non_blocking)
        return result


@cache
def _schema_of(func: Any) -> tuple[str, str, list[str], set[str]]:
    """Returns the namespace and the name of an operation, the names of its arguments, and of those that it writes to.

    Torch makes these objects anew each time that they are asked for.
    """
    namespace, name = func._schema.name.split("::")
    arguments = func._schema.arguments
    writing = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
    return namespace, name, [one.name for one in arguments], writing


def _note(name: str, reads: list[Tensor], writes: list[Tensor], results: list[Tensor], non_blocking: bool) -> None:
    storages = {tensor.untyped_storage()._cdata for tensor in [*reads, *writes]}
    made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
    if results and not made and not writes:  # views
        return
    devices = [device for tensor in [*reads, *writes] if (device := device_of(tensor)) != CPU]
    placed = getattr(_this_thread, "placed", None)
    if placed is None:
        placed = devices[0] if devices else CPU
    if name.startswith(SHAPES_ONLY):
        reads, devices = [], []
    if placed == CPU and not devices:
        HOST.begin()
        where = place()
        for tensor in made:
            memory.memory_of(tensor)
        for tensor in reads:
            memory.access(HOST, tensor, False, where)
        for tensor in [*writes, *made]:
            memory.access(HOST, tensor, True, where)
        return
    stream = current_stream(placed if placed != CPU else devices[0])
    stream.begin()
    memory.check_released(stream)
    where = f"{name} of {place()}"
    for tensor in made:
        memory.memory_of(tensor, None if placed == CPU else stream)
    waits = name in READ_BY_HOST
    for tensor in [*reads, *writes, *made]:
        writes_to = not any(tensor is read for read in reads)
        if is_on_device(tensor) or name in COPIES:
            memory.access(stream, tensor, writes_to, where)
            waits |= not is_on_device(tensor) and not non_blocking
        elif name not in READ_BY_HOST:  # a number, which the host passes when it enqueues the operation
            HOST.begin()
            memory.access(HOST, tensor, writes_to, where)
            if tensor.dim():
                reports[f"device: a tensor of the host in {where}"] += 1
    if waits:
        wait_on_host(stream.clock)
    if name in COPIES and devices and not all(is_on_device(tensor) for tensor in [*writes, *made]):
        streams.num_copies_to_host += 1


def _is_over_nccl(args: Any) -> bool:
    objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    groups = [ProcessGroup.unbox(each) for each in objects if "ProcessGroup" in str(each._type())]
    return any(group.group_name in nccl_groups for group in groups)


def _run_on_copies(func: Any, args: Any) -> Any:
    """Runs a collective to its end; Gloo's threads would hold the memory of its tensors for a while after that."""
    copies = tree_map_only(Tensor, Tensor.clone, args)
    result = func(*copies)
    Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
    for tensor, copy in zip(_tensors(args[0]), _tensors(copies[0]), strict=True):
        tensor.copy_(copy)
    return result


def _note_communication(name: str, reads: list[Tensor], writes: list[Tensor], args: Any) -> None:
    where, over_nccl = f"{name} of {place()}", _is_over_nccl(args)
    devices = [device for tensor in [*reads, *writes] if (device := device_of(tensor)) != CPU]
    party = current_stream(devices[0]) if over_nccl and name in COLLECTIVES and devices else HOST
    party.begin()
    for tensor in [*reads, *writes]:
        if is_on_device(tensor) != (party is not HOST):
            reports[f"device: a tensor that {'NCCL' if over_nccl else 'Gloo'} does not send in {where}"] += 1
        memory.access(party, tensor, not any(tensor is read for read in reads), where)


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors of an argument or a result."""
    if isinstance(value, Tensor):
        return [value] if value.layout == torch.strided and not value.is_meta else []
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []
