"""A step on the device: how often the host waits for it, the kernels of a bucket, and the memory beside DDP's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.nccl import NcclExchange
from tests.conformance.methods import METHODS
from tests.cuda.device import (
    BACKEND,
    DEVICE,
    ON_GPU,
    forget_peak,
    launch_on_device,
    launch_with_both,
    needs_cuda,
    no_synchronization,
    synchronize,
)
from tests.nightly.core.test_devices import WAITS
from tests.support.case_table import Outcomes, launch_cases

Record = Callable[[str, object], None]

WARM_UP, MEASURED = 16 if ON_GPU else 2, 4
#: Kernels of a reduce-scatter and an all-gather of fp32 values, as docs/testing.md has them.
KERNELS = {"none": 3, "bf16": 6, "fp8": 6, "int8": 6, "int4": 6, "chunked_topk": 6}
#: Settings in which the memory of methods is compared with DDP's.
SETTINGS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer"},
    "selsync": {"delta": 0.0},
    "local_sgd": {"period": 2},
    "pipe_sgd": {},
}
WIDTH, BATCH = 1024 if ON_GPU else 64, 32


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).to(DEVICE)


def train(model: nn.Module, step: Callable[[], object], steps: int) -> None:
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    for _ in range(steps):
        model(x).square().mean().backward()
        step()
        model.zero_grad()


def waits_in_steps(name: str) -> int:
    make, settings, _ = WAITS[name]
    with patch.object(Collectives, "_alone", False):  # collectives of NCCL that one rank would leave out
        model = network()
        sync = make(model, torch.optim.SGD(model.parameters(), lr=0.01), backend=BACKEND, **settings)
        train(model, sync.step, WARM_UP)
        synchronize()
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as caught, no_synchronization("warn"):
            warnings.simplefilter("always")
            train(model, sync.step, MEASURED)
        torch.set_warn_always(False)
        sync.detach()
    return sum("synchronizing" in str(warning.message) for warning in caught)


@cache
def waits() -> Outcomes:
    return launch_cases({name: partial(waits_in_steps, name) for name in WAITS}, 1, launch=launch_on_device)


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_no_more_often_than_is_counted(name: str, record_property: Record) -> None:
    [number] = waits()[name]
    record_property(f"{name}: waits of the host in {MEASURED} steps", number)
    assert number <= WAITS[name][2] * MEASURED


def kernels_of_a_bucket(codec_name: str) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    exchange, codec = NcclExchange(dist.new_group(backend="nccl"), DEVICE), get_codec(codec_name)
    flat = torch.randn(1_000_000, device=DEVICE)

    def reduce_and_gather() -> None:
        exchange.reduce_scatter(flat, codec, True, None)()
        exchange.all_gather(flat, codec, None)()
        torch.cuda.synchronize()

    for _ in range(3):
        reduce_and_gather()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        reduce_and_gather()
    return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@cache
def kernels() -> Outcomes:
    return launch_cases({name: partial(kernels_of_a_bucket, name) for name in KERNELS}, 1, launch=launch_on_device)


@needs_cuda
@pytest.mark.parametrize("codec", KERNELS)
def test_kernels_of_a_bucket(codec: str, record_property: Record) -> None:
    """A rank that is alone launches copies in place of collectives."""
    [names] = kernels()[codec]
    record_property(f"{codec}: launches of a bucket", f"{len(names)}; the page says {KERNELS[codec]}")
    assert 0 < len(names) <= KERNELS[codec], names


def peak_mib(name: str | None) -> float:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with patch.object(Collectives, "_alone", False):
        if name is None:
            trained: Any = DistributedDataParallel(model)
            step: Callable[[], object] = optimizer.step
        else:
            sync = METHODS[name].plain(model, optimizer, backend=BACKEND, **SETTINGS[name])
            trained, step = model, sync.step
        train(trained, step, WARM_UP)
        synchronize()
        forget_peak()
        train(trained, step, MEASURED)
        synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**20
        if name is not None:
            sync.detach()
    return peak


def test_memory_beside_ddp(record_property: Record) -> None:
    cases = {name: partial(peak_mib, name) for name in (None, *SETTINGS)}
    outcomes = launch_cases(cases, 1, launch=launch_with_both)
    peaks = {name: outcomes[name][0] for name in cases}
    if not ON_GPU:
        pytest.skip("the memory of a CPU is not counted")
    for name in SETTINGS:
        record_property(f"{name}: peak memory over DDP's", f"{peaks[name] / peaks[None]:.2f} ({peaks[name]:.0f} MiB)")
