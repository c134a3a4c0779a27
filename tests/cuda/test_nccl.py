"""NCCL with one rank: the collectives of the transport, and the exchange itself, whose arithmetic the CPU repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from tests.cuda.device import DEVICE, launch_on_device, needs_cuda, recorded, sleep
from tests.quick.core.test_nccl import exchange_all_kinds
from tests.references.collectives import BROADCAST, DTYPES, LOSSY, SIZES, values

pytestmark = needs_cuda


def use_the_transport() -> dict[str, Any]:
    transport = Transport(DEVICE.type, timeout_s=60)
    same = {"backend": transport.backend == "nccl", "device": transport.device == DEVICE}
    for dtype in DTYPES:
        for numel in SIZES:
            flat = values(numel, dtype, 0).to(DEVICE)
            transport.all_reduce(flat).wait()
            transport.reduce_scatter(flat).wait()
            transport.all_gather(flat).wait()
            same[f"{dtype} {numel}"] = torch.equal(flat.cpu(), values(numel, dtype, 0))
    for dtype in BROADCAST:
        for device in (DEVICE, torch.device("cpu")):
            flat = torch.ones(3, device=device).to(dtype)
            same[f"broadcast, {dtype} on {device}"] = bool((transport.broadcast(flat).wait() == 1).all())
    same["flags"] = transport.exchange_flags(7).wait() == [7]
    same["union"] = transport.union([True, False]).wait() == [True, False]
    same["objects"] = transport.gather_objects("one") == ["one"]
    transport.close()
    return same


def test_collectives_of_the_transport() -> None:
    """A device without an index is the current one."""
    [same] = launch_on_device(use_the_transport, 1)
    assert all(same.values()), [name for name, equal in same.items() if not equal]


def exchange_on_device() -> dict[str, Any]:
    # What top-k has encoded has many equal magnitudes, of which another device may keep others the next time.
    codecs = [name for name in LOSSY if "topk" not in name]
    return exchange_all_kinds(NcclExchange(dist.new_group(backend="nccl"), DEVICE), DEVICE, codecs=codecs)


@pytest.mark.parametrize("part", ["lossless", "compressed", "feedback", "broadcast"])
def test_the_exchange_makes_what_gloo_makes(part: str) -> None:
    [same] = launch_on_device(exchange_on_device, 1)
    chosen = {name: equal for name, equal in same.items() if name.startswith(part)}
    assert chosen
    assert all(chosen.values()), [name for name, equal in chosen.items() if not equal]


def never_blocks(codec_name: str) -> list[bool]:
    """Returns whether the caller's work was still running when the host had enqueued and waited for an operation."""
    exchange, codec = NcclExchange(dist.new_group(backend="nccl"), DEVICE), get_codec(codec_name)
    flat = torch.zeros(100_000, device=DEVICE)
    outcomes = []
    for operation in (
        lambda: exchange.all_reduce(flat, codec, True, ErrorFeedback(flat, 1)),
        lambda: exchange.reduce_scatter(flat, codec, True, None),
        lambda: exchange.all_gather(flat, codec, None),
        lambda: exchange.broadcast(flat, 0),
    ):
        for _ in range(2):  # the first time connects, and loads kernels, for which the host may wait
            flat.zero_()
            torch.cuda.synchronize()
            sleep()
            flat.fill_(1.0)  # after the sleep, and before the operation
            copy = operation()().clone()
            running = not recorded().query()
            torch.cuda.current_stream().synchronize()
        outcomes += [running, bool((copy == 1).all())]
    return outcomes


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_operations_follow_the_callers_work_and_never_block_the_host(codec: str) -> None:
    assert launch_on_device(never_blocks, 1, codec) == [[True] * 8]
