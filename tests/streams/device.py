"""Devices that do not exist: within :func:`cuda` CPU tensors and the package believe that they do.

What torch has for CUDA is replaced by name, so that the package runs unchanged; a Gloo group stands in for NCCL. Each
rank has a device of its own, see [Note: devices] in streams.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.streams import memory, streams
from tests.streams.checker import CPU, Checker, device_of, is_on_device, nccl_groups, placing

FACTORIES = ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "arange", "tensor", "as_tensor")
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")

#: What no rank sends.
MESSAGE = torch.zeros(1)

_real_device = Tensor.device
_real_to, _real_tolist, _real_numpy = Tensor.to, Tensor.tolist, Tensor.numpy
_real_run, _real_backward, _real_autocast = threading.Thread.run, torch.autograd.backward, torch.autocast
_real_new_group, _real_group_by_device = dist.new_group, clip_grad._group_tensors_by_device_and_dtype


@contextmanager
def cuda() -> Iterator[None]:
    """Context in which the device exists, and the operations of all new threads and of this one are checked."""
    with ExitStack() as stack:
        for name, value in _of_cuda().items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in (*FACTORIES, *LIKE):
            stack.enter_context(patch.object(torch, name, _factory(getattr(torch, name), name in FACTORIES)))
        for name, value in _of_tensors().items():
            stack.enter_context(patch.object(Tensor, name, value, create=True))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", memory.resize))
        stack.enter_context(patch.object(threading.Thread, "run", _run))
        stack.enter_context(patch.object(torch.autograd, "backward", _backward))
        stack.enter_context(patch.object(torch, "autocast", _autocast))
        stack.enter_context(patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(patch("lightning_pipesync.core.codecs.shards.runs_triton", lambda _: False))
        stack.enter_context(patch.object(dist, "new_group", _new_group))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
        stack.enter_context(patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), create=True))
        stack.enter_context(patch.object(clip_grad, "_group_tensors_by_device_and_dtype", _group_by_device))
        _meet_messages()
        stack.enter_context(Checker())
        streams.forget_devices()
        nccl_groups.clear()  # new groups have the names of those of the last call
        yield
        memory.forget()
        streams.forget_streams()


class _Refused(TorchDispatchMode):
    """Runs no operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def _meet_messages() -> None:
    """Has torch look up the operations of messages: two threads that did so at once would crash."""
    group = dist.group.WORLD
    if group is None:
        return
    with _Refused():
        for operation in (group.send, group.recv):
            with suppress(NotImplementedError):
                operation([MESSAGE], 0, 0)


def _of_cuda() -> dict[str, Any]:
    return {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "current_stream": streams.current_stream,
        "stream": streams.stream,
        "synchronize": streams.synchronize,
        "device": streams.device,
        "set_device": streams.set_device,
        "current_device": streams.current_device,
        "device_count": lambda: 8,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda _: (8, 0),
        "get_device_name": lambda _: "none",
        "get_rng_state": lambda _: torch.zeros(1),
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda _: None,
    }


def _of_tensors() -> dict[str, Any]:
    return {
        "device": property(_device),
        "is_cuda": property(lambda tensor: _device(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: _device(tensor).type == "cpu"),
        "to": _to,
        "cpu": lambda tensor: _to(tensor, "cpu"),
        "cuda": lambda tensor, device="cuda", **options: _to(tensor, device, **options),
        "tolist": _tolist,
        "numpy": _numpy,
        "record_stream": memory.record_stream,
    }


def _device(tensor: Tensor) -> torch.device:
    real: torch.device = _real_device.__get__(tensor)
    return device_of(tensor) if real.type == "cpu" else real


def _to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """``Tensor.to``, which copies if the device is another one."""
    targets = [*(arg for arg in args if isinstance(arg, (torch.device, str, Tensor))), options.pop("device", None)]
    target: Any = next((target for target in targets if target is not None), None)
    rest = [arg for arg in args if arg is not target]
    if target is None:
        return _real_to(tensor, *args, **options)
    if isinstance(target, Tensor):
        target, rest = target.device, [target.dtype, *rest]
    target = streams.with_index(target)
    if target.type == "meta":
        return _real_to(tensor, *args, **options)
    dtype = next((arg for arg in rest if isinstance(arg, torch.dtype)), options.pop("dtype", None))
    options["copy"] = options.get("copy", False) or target != _device(tensor)
    with placing(target):
        return _real_to(tensor, dtype or tensor.dtype, **options)


def _tolist(tensor: Tensor) -> Any:
    if is_on_device(tensor):
        tensor = _to(tensor, "cpu")
    return _real_tolist(tensor)


def _numpy(tensor: Tensor, *args: Any, **options: Any) -> Any:
    if is_on_device(tensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")
    return _real_numpy(tensor, *args, **options)


def _factory(make: Callable[..., Tensor], on_host: bool) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        if device is None:
            with placing(CPU) if on_host else nullcontext():
                return make(*args, **options)
        device = streams.with_index(device)
        if device.type == "meta":
            return make(*args, device=device, **options)
        with placing(device):
            return make(*args, **options)

    return made


def _run(thread: threading.Thread) -> None:
    with Checker():
        _real_run(thread)


def _backward(*args: Any, **options: Any) -> None:
    """``torch.autograd.backward``, whose hooks run on the device's own thread, on the stream of the forward pass."""
    stream, errors = streams.current_stream(streams.own_device()), []

    def run() -> None:
        try:
            with streams.stream(stream):
                _real_backward(*args, **options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="autograd")
    thread.start()
    thread.join()
    for error in errors:
        raise error


def _autocast(device_type: str, *args: Any, **options: Any) -> torch.autocast:
    return _real_autocast("cpu" if device_type == "cuda" else device_type, *args, **options)


def _new_group(*args: Any, backend: str | None = None, pg_options: Any = None, **options: Any) -> Any:
    options["backend"] = "gloo" if backend == "nccl" else backend
    group = _real_new_group(*args, **options)
    if backend == "nccl" and isinstance(group, dist.ProcessGroup):
        nccl_groups.add(group.group_name)
    return group


def _group_by_device(tensors: Any, *args: Any) -> Any:
    grouped = _real_group_by_device(tensors, *args)
    return {(tensors[0][0].device, dtype): lists for (_, dtype), lists in grouped.items()}
