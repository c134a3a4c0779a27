"""The arithmetic of the exchange over NCCL, on a CPU: its group is one of Gloo's, and its streams are stand-ins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch._dynamo  # asks CUDA for its devices when it is first needed
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_of, with_room, zeros_with_room
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.gloo import GlooExchange
from lightning_pipesync.core.comm.nccl import NcclExchange, destroy_nccl_groups, new_nccl_group
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from tests.references.collectives import DTYPES, LOSSY, SIZES, values
from tests.streams.device import cuda
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks

CPU = torch.device("cpu")


@contextmanager
def nccl_on_the_host() -> Iterator[None]:
    """Context in which streams do nothing."""
    cuda = MagicMock()
    cuda.stream = lambda _: nullcontext()
    with (
        patch("lightning_pipesync.core.comm.nccl.torch.cuda", cuda),
        patch.object(Tensor, "record_stream", lambda *_: None),
    ):
        yield


def exchange_all_kinds(
    exchange: NcclExchange, device: torch.device, sizes: Sequence[int] = SIZES, codecs: Sequence[str] = LOSSY
) -> dict[str, bool]:
    """Returns by the name of each operation whether it makes what the exchange over Gloo makes of CPU tensors."""
    transport = Transport(timeout_s=60)
    gloo = transport._exchange
    assert isinstance(gloo, GlooExchange)
    rank, world_size = transport.rank, transport.world_size
    same: dict[str, bool] = {}

    def compare(name: str, numel: int, dtype: torch.dtype, codec_name: str, with_feedback: bool = False) -> None:
        codec = get_codec(codec_name)
        mean = dtype.is_floating_point
        tensors = [values(numel, dtype, rank), values(numel, dtype, rank).to(device, copy=True)]
        feedback = [ErrorFeedback(tensor, world_size) if with_feedback else None for tensor in tensors]
        ring = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}
        for _ in range(3 if with_feedback else 1):
            for one, tensor, residuals in zip((gloo, exchange), tensors, feedback, strict=True):
                own = one.reduce_scatter(tensor, codec, mean, residuals)()
                assert own.data_ptr() == shard_of(tensor, rank, world_size).data_ptr() or not own.numel()
                one.all_gather(tensor, codec, residuals)()
                hook = None if codec.gathered else lambda own: own.add_(rank)
                one.all_reduce(tensor, codec, mean, residuals, hook)()
                if codec.lossless:
                    shard_of(tensor, rank, world_size).add_(1)
                    one.all_gather(tensor, codec, None, slice(1, 300))()
                    if mean:
                        tensor.add_(rank)
                        assert one.average_with(tensor, [*ring])() is tensor
                        tensor.mul_(rank + 1)
                        assert one.average_at(tensor, world_size - 1)() is tensor
        same[name] = is_near(codec_name, *tensors)
        if codec_name == "none" and world_size > 2:  # the backend itself sums, in an order of its own
            ulp = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 1e-6
            same[name] = torch.allclose(tensors[0], tensors[1].cpu(), rtol=2 * ulp, atol=1e-5)
        if with_feedback and is_bitwise(codec_name):
            kinds = [residuals.state_dict() for residuals in feedback if residuals is not None]
            same[f"{name}, residuals"] = all(is_near(codec_name, kinds[0][kind], kinds[1][kind]) for kind in kinds[0])

    for numel in sizes:
        for dtype in DTYPES:
            compare(f"lossless, {dtype} {numel}", numel, dtype, "none")
        for codec_name in codecs:
            # The last rank's slice is padded here, of which top-k sends a share.
            if "topk" not in codec_name or numel % world_size == 0:
                compare(f"compressed, {codec_name} {numel}", numel, torch.float32, codec_name)
                compare(f"feedback, {codec_name} {numel}", numel, torch.float32, codec_name, with_feedback=True)
                compare(f"feedback, bf16 by {codec_name} {numel}", numel, torch.bfloat16, codec_name, True)
    for dtype in (torch.float32, torch.bool, torch.int64):
        sent = values(1000, torch.float32, rank).to(device).to(dtype)
        received = exchange.broadcast(sent, world_size - 1)()
        expected = values(1000, torch.float32, world_size - 1).to(dtype)
        same[f"broadcast, {dtype}"] = torch.equal(received.cpu(), expected)
    transport.close()
    return same


def is_bitwise(codec_name: str) -> bool:
    """Returns whether every device encodes the same bits: scales are quotients, which CUDA rounds otherwise."""
    return codec_name not in ("fp8", "int8", "int4", "int2")


def is_near(codec_name: str, on_cpu: Tensor, other: Tensor) -> bool:
    """Returns whether two results are the same, but for a step, where scales differ in the last bit."""
    other = other.cpu()
    if torch.equal(on_cpu, other):
        return True
    step = on_cpu.abs().max().float() / {"fp8": 14, "int4": 7, "int2": 1.5}.get(codec_name, 127)
    return not is_bitwise(codec_name) and bool(((on_cpu.float() - other.float()).abs() <= 3 * step).all())


def exchange_on_the_host(sums_wide: bool, sizes: Sequence[int]) -> dict[str, Any]:
    with nccl_on_the_host():
        return exchange_all_kinds(NcclExchange(dist.new_group(backend="gloo"), CPU, sums_wide), CPU, sizes)


@pytest.mark.parametrize(("world_size", "sums_wide"), [(2, False), (3, True)])
def test_makes_what_gloo_makes(world_size: int, sums_wide: bool) -> None:
    """Also with slices that are padded. What the exchange sums itself, it sums in the order of the ranks."""
    for same in on_ranks(exchange_on_the_host, world_size, sums_wide, [0, 5, 1000]):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


def with_room_for(tensor: Tensor, num_shards: int) -> Tensor:
    return zeros_with_room(tensor.numel(), num_shards, tensor.dtype, tensor.device).copy_(tensor)


def spoil_the_room(flat: Tensor, world_size: int) -> None:
    whole = with_room(flat, -(-flat.numel() // world_size) * world_size)
    assert whole is not None
    assert whole.numel() > flat.numel()
    whole[flat.numel() :].fill_(math.nan if flat.is_floating_point() else 99)


def in_turns(exchange: NcclExchange, flat: Tensor, codec_name: str, spoils: bool) -> list[Tensor]:
    """Returns the results of collectives, and the residuals after each; ``spoils`` the room before each."""
    world_size, codec, results = dist.get_world_size(), get_codec(codec_name), []
    feedback = None if codec.lossless else ErrorFeedback(flat, world_size)
    if feedback is not None and not spoils:
        feedback.contribution = feedback.contribution.clone()  # without room
    operations = [
        lambda: exchange.reduce_scatter(flat, codec, False, feedback)(),
        lambda: exchange.all_gather(flat, codec, feedback)(),
        lambda: exchange.all_reduce(flat, codec, flat.is_floating_point(), feedback)(),
    ]
    for operation in [*operations, *operations]:
        for each in [flat, *([] if feedback is None else [feedback.contribution])] if spoils else []:
            spoil_the_room(each, world_size)
        results.append(operation().clone())
        results += [] if feedback is None else [residual.clone() for residual in feedback.state_dict().values()]
    return results


def exchange_with_room(sums_wide: bool) -> dict[str, bool]:
    """Returns by codec, type and size whether a buffer with room, whatever is in it, gets the same as one without."""
    kinds = [("none", dtype) for dtype in DTYPES] + [
        (name, dtype) for name in LOSSY for dtype in (torch.float32, torch.bfloat16)
    ]
    same = {}
    with nccl_on_the_host():
        exchange = NcclExchange(dist.new_group(backend="gloo"), CPU, sums_wide)
        for codec_name, dtype in kinds:
            for numel in (1, 2501):
                flat = values(numel, dtype, dist.get_rank())
                roomy = with_room_for(flat, dist.get_world_size())
                expected = in_turns(exchange, flat, codec_name, spoils=False)
                results = in_turns(exchange, roomy, codec_name, spoils=True)
                same[f"{codec_name}, {dtype} {numel}"] = all(map(torch.equal, results, expected))
    return same


def test_what_is_in_the_room_changes_nothing() -> None:
    """Neither a scale nor what top-k keeps; bit for bit as with padded copies."""
    for same in on_ranks(exchange_with_room, 3, True):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


@contextmanager
def recorded_options() -> Iterator[list[Any]]:
    """Context in which the options of NCCL's groups are listed; ``max_ctas`` is None until it is set."""
    listed: list[Any] = []

    def options(**_: bool) -> SimpleNamespace:
        listed.append(SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
        return listed[-1]

    with patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), create=True):
        yield listed


def ctas_of_a_transport(num_hosts: int) -> list[int | None]:
    host = f"host {dist.get_rank() * num_hosts // dist.get_world_size()}"
    with (
        cuda(),
        recorded_options() as listed,
        patch("lightning_pipesync.core.comm.groups.socket.gethostname", lambda: host),
    ):
        Transport("cuda", timeout_s=30, topology="rows", torus_columns=2).close()
    return [options.config.max_ctas for options in listed]


@pytest.mark.parametrize(("num_hosts", "ctas"), [(1, [None] * 5), (2, [4, None, None, 4, 4])])
def test_groups_of_several_hosts_take_few_thread_blocks(num_hosts: int, ctas: list[int | None]) -> None:
    """The group of all ranks, those of the rows, each on one host, and of the columns, from host to host."""
    assert on_ranks(ctas_of_a_transport, 4, num_hosts) == [ctas] * 4


@pytest.mark.parametrize("name", ["NCCL_MIN_CTAS", "NCCL_MAX_CTAS"])
def test_thread_blocks_that_the_user_has_set_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a group is made with nothing in flight, which a default group that is split must not meet."""
    monkeypatch.setenv(name, "16")
    calls = MagicMock()
    with (
        recorded_options() as listed,
        patch.object(torch.cuda, "synchronize", calls.synchronize),
        patch.object(dist, "new_group", calls.new_group),
    ):
        new_nccl_group(None, CPU, timedelta(seconds=5), several_hosts=True)
    assert [options.config.max_ctas for options in listed] == [None]
    assert [called for called, _, _ in calls.mock_calls] == ["synchronize", "new_group"]


def hosts_of_a_transport(*names: str) -> list[bool]:
    with patch("lightning_pipesync.core.comm.groups.socket.gethostname", lambda: names[dist.get_rank()]):
        transport = Transport(timeout_s=30)
    shared = [transport._groups.share_a_host(ranks) for ranks in ([0, 1], [0])]
    transport.close()
    return shared


def average_in_background() -> list[float]:
    with nccl_on_the_host():
        transport = Transport(timeout_s=30)
        transport._nccl = transport._exchange = exchange = NcclExchange(dist.new_group(backend="gloo"), CPU)
        with patch.object(transport, "_exchange_of", lambda _: exchange):
            result: list[float] = transport.all_reduce(torch.full([3], 1.0), background=True).wait().tolist()
        transport.close()
    return result


def close_while_a_kernel_waits_for_a_lost_peer() -> None:
    transport = Transport(timeout_s=30)
    group = dist.new_group(backend="gloo")
    transport._groups._groups.append(group)
    get_backend, destroy, end = dist.get_backend, dist.destroy_process_group, Event()
    with (
        patch.object(dist, "get_backend", lambda of=None: "nccl" if of is group else get_backend(of)),
        patch.object(dist, "destroy_process_group", lambda of: end.wait() if of is group else destroy(of)),
    ):
        transport.close(timeout_s=0.1)
        end.set()


def test_a_transport_over_nccl() -> None:
    """Ranks know which of them share a host; an all-reduce in the background, which advances by itself, is waited for;
    closing never waits for a lost peer's kernel."""
    hosts = {names: partial(hosts_of_a_transport, *names) for names in (("host 0", "host 1"), ("host", "host"))}
    others = {"background": average_in_background, "close": close_while_a_kernel_waits_for_a_lost_peer}
    outcomes = launch_cases({**hosts, **others}, 2)
    assert outcomes["host 0", "host 1"] == [[False, False]] * 2
    assert outcomes["host", "host"] == [[True, False]] * 2
    assert outcomes["background"] == [[2.0] * 3] * 2
    assert outcomes["close"] == [None] * 2


def test_after_an_error_groups_are_aborted_together_and_destroyed_also_if_that_fails() -> None:
    group, destroyed = MagicMock(), MagicMock()
    with patch.object(dist, "destroy_process_group"):
        destroy_nccl_groups([group, group], abort=True)
    calls = [name.rpartition(".")[2] for name, _, _ in group._get_backend().mock_calls]
    assert calls == ["_group_start", "abort", "abort", "_group_end"]
    group._get_backend().abort.side_effect = RuntimeError("NCCL communicator was aborted")
    with patch.object(dist, "destroy_process_group", destroyed):
        destroy_nccl_groups([group, group], abort=True)
    assert destroyed.call_count == 2
