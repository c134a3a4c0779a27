"""The one CUDA device of these tests, and the ranks that share it. Without one, what a CPU can rehearse runs there."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.cases import cases_of
from tests.conformance.methods import Method
from tests.conformance.training import Options
from tests.support.harness import launch, on_ranks

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
#: Of a rank that has the device for itself.
BACKEND = "nccl" if ON_GPU else "gloo"

needs_cuda = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

#: Cycles of a kernel that is still running when the host, which does not wait for it, has gone on: about half a second.
LONG = 10**9


def sleep() -> None:
    """Enqueues a long kernel on the current stream."""
    torch.cuda._sleep(LONG)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Gives back what earlier trainings have left to the allocator, and counts anew from what is there."""
    if ON_GPU:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def no_synchronization(mode: str = "error") -> Iterator[None]:
    """Context in which it is an error, or a warning, that the host waits for the device."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def recorded() -> torch.cuda.Event:
    """Returns an event at the end of the present work of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def on_device(options: Options, ranks: int) -> Options:
    return replace(options, device=DEVICE.type, ranks=ranks)


def cases_on_device(framework: str, method: Method | None) -> list[str]:
    """Returns the names of the cases that are trained on the device; a rehearsal has one, as other tests have all."""
    return cases_of(framework, method)[: None if ON_GPU else 1]


def launch_on_device(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` ranks, all of which use the one device, see :func:`launch`."""
    if ON_GPU:
        return launch(partial(_use_device, function), world_size, *args, spawn=True, **options)
    return (launch if "may_die" in options else on_ranks)(function, world_size, *args, **options)


def launch_with_both(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """As :func:`launch_on_device`, with a default process group of both backends."""
    return launch_on_device(partial(_with_both, function), world_size, *args, **{**options, "init": False})


def launch_over_nccl(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """As :func:`launch_with_both`; NCCL takes each rank for a host of its own, so that they may share the device."""
    return launch_with_both(partial(_on_own_host, function), world_size, *args, **options)


@cache
def why_not_over_nccl() -> str:
    """Returns why NCCL does not carry tensors between two ranks that share the device; empty if it does."""
    if not ON_GPU:
        return "needs a CUDA device"
    try:
        [result, _] = launch_over_nccl(_sum_over_nccl, 2, timeout_s=60)
    except AssertionError as error:  # they wait for ever, or have died
        return str(error)
    return str(result)


def skip_unless_over_nccl() -> None:
    if reason := why_not_over_nccl():
        pytest.skip(f"NCCL does not run on two ranks of one device: {reason}")


def _sum_over_nccl() -> str:
    try:
        ones = torch.ones(1000, device=DEVICE)
        dist.all_reduce(ones, group=dist.new_group(backend="nccl", timeout=timedelta(seconds=30)))
        return "" if bool((ones == 2).all()) else f"a sum of ones over two ranks was {ones.unique().tolist()}"
    except RuntimeError as error:  # such as "Duplicate GPU detected"
        return str(error)


def _with_both(function: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    return function(*args)


def _on_own_host(function: Callable[..., Any], *args: Any) -> Any:
    os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on
    return function(*args)


def _use_device(function: Callable[..., Any], *args: Any) -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products have the same bits on whichever stream
    torch.cuda.set_device(DEVICE)
    return function(*args)
