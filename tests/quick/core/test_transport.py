"""The transport against `dist.all_reduce`, in any order of waiting, and when a peer is gone."""

from __future__ import annotations

import os
import signal
from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.buckets import shard_numel, shard_of
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm import all_to_all
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.transport import Transport
from tests.references.pipe_sgd import all_reduce
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import DIED, assert_refused, kill_stopped_siblings, launch, on_ranks, raised
from tests.support.lost_ranks import be_patient

SIZES = [0, 1, 2, 3, 5, 64, 1000, 4097, 10_007]  # larger ones take the ring on 3 ranks, which has its own tests
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
LOSSY = ["bf16", "fp16", "truncate16", "fp8", "int8", "int4", "int2", "topk", "chunked_topk"]


def values(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return (torch.randn(numel, generator=generator) * 10).to(dtype)


def rank_order_sum(numel: int, dtype: torch.dtype, world_size: int) -> torch.Tensor:
    """What every rank must get: fp32 sums (fp64, integers in their own type) in the order of the ranks."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = values(numel, dtype, 0).to(wide)
    for rank in range(1, world_size):
        total = total + values(numel, dtype, rank).to(wide)
    return total.to(dtype)


def all_reduce_all_kinds() -> dict[str, bool]:
    transport = Transport(timeout_s=60)
    same = {}
    for dtype in DTYPES:
        for numel in SIZES:
            flat = values(numel, dtype, transport.rank)
            transport.all_reduce(flat).wait()
            expected = rank_order_sum(numel, dtype, transport.world_size)
            same[f"{dtype} {numel}"] = torch.equal(flat, expected)
            if dtype in (torch.float32, torch.int64):
                reference = values(numel, dtype, transport.rank)
                dist.all_reduce(reference)
                torch.testing.assert_close(flat, reference)
    transport.close()
    return same


def all_reduce_with_a_small_window() -> dict[str, bool]:
    with mock.patch.multiple(all_to_all, MOST_STEPS=1, LEAST_STEPS=1):
        return all_reduce_all_kinds()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_sums_in_rank_order(world_size: int) -> None:
    """Also with a window of one message."""
    cases = {"small window": all_reduce_with_a_small_window} if world_size == 4 else {}
    outcomes = launch_cases({"usual": all_reduce_all_kinds, **cases}, world_size)
    for same in (same for case in ("usual", *cases) for same in outcomes[case]):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


def halves() -> list[torch.Tensor]:
    transport = Transport(timeout_s=60)
    flat = values(1001, torch.float32, transport.rank)
    own = transport.reduce_scatter(flat, mean=True).wait()
    assert own.data_ptr() == transport.shard(flat).data_ptr() or own.numel() == 0
    reduced = own.clone()
    transport.all_gather(flat).wait()
    transport.close()
    return [reduced, flat]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_two_halves_make_an_all_reduce(world_size: int) -> None:
    expected = rank_order_sum(1001, torch.float32, world_size) / world_size
    for rank, (reduced, flat) in enumerate(on_ranks(halves, world_size)):
        assert torch.equal(reduced, shard_of(expected, rank, world_size))
        assert torch.equal(flat, expected)


def gather_in_parts(numel: int) -> tuple[torch.Tensor, list[int]]:
    """All-gathers two parts of the shards, both in flight at once, and not the third."""
    transport = Transport(timeout_s=60)
    size = shard_numel(numel, transport.world_size)
    flat = torch.full((numel,), -1.0)
    transport.shard(flat).fill_(transport.rank)
    parts = slice(0, size // 3), slice(size // 3, size // 2)
    handles = [transport.all_gather(flat, part=part) for part in parts]
    for handle in handles:
        handle.wait()
    sent = transport.traffic.bytes_sent["all_gather"]
    transport.close()
    return flat, [sent, size]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parts_of_shards_are_gathered(world_size: int) -> None:
    """The last size travels in a ring."""
    sizes = (3, 1001, 2**20 + 3)
    outcomes = launch_cases({numel: partial(gather_in_parts, numel) for numel in sizes}, world_size)
    for rank, (flat, [sent, size]) in (one for numel in sizes for one in enumerate(outcomes[numel])):
        for owner in range(world_size):
            shard = shard_of(flat, owner, world_size)
            assert (shard[: size // 2] == owner).all()
            assert (shard[size // 2 :] == (owner if owner == rank else -1)).all()
        own = shard_of(flat, rank, world_size)[: size // 2]
        assert sent == own.nbytes * (world_size - 1)


def compressed(name: str) -> list[torch.Tensor]:
    transport = Transport(timeout_s=60)
    results = []
    for numel in (1, 7, 5000):
        flat = values(numel, torch.float32, transport.rank)
        transport.all_reduce(flat, codec=name, mean=True).wait()
        results.append(flat)
    transport.close()
    return results


@cache
def all_compressed(world_size: int) -> Outcomes:
    return launch_cases({name: partial(compressed, name) for name in LOSSY}, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", LOSSY)
def test_compressed_once_on_each_half(name: str, world_size: int) -> None:
    """Each slice: mean of decode(encode(contribution)), then decode(encode(mean)); the same bits on every rank."""
    outcomes = all_compressed(world_size)[name]
    for index, numel in enumerate((1, 7, 5000)):
        of_ranks = [values(numel, torch.float32, rank) for rank in range(world_size)]
        expected = all_reduce(of_ranks, get_codec(name), None)
        for outcome in outcomes:
            assert torch.equal(outcome[index], expected)


def errors_of_means(name: str) -> list[float]:
    """Returns how far the mean over 20 and over 400 steps is off."""
    transport = Transport(timeout_s=60)
    true, expected = values(1000, torch.float32, transport.rank), rank_order_sum(1000, torch.float32, 2) / 2
    feedback, total, errors = transport.feedback(true), torch.zeros_like(true), []
    for step in range(1, 401):
        flat = true.clone()
        transport.all_reduce(flat, codec=name, mean=True, feedback=feedback).wait()
        total += flat
        if step in (20, 400):
            errors.append((total / step - expected).abs().max().item())
    transport.close()
    return errors


def test_feedback_makes_good_what_the_codec_drops() -> None:
    """What was dropped arrives later: the mean over steps comes nearer to the truth, as 1 / steps."""
    outcomes = launch_cases({name: partial(errors_of_means, name) for name in ("int8", "topk")}, 2)
    for first, last in (outcomes["int8"][0], outcomes["topk"][0]):
        assert last < first / 4


def half_precision_means() -> list[float]:
    transport = Transport(timeout_s=60)
    large = torch.full((5,), 60_000.0, dtype=torch.float16)
    transport.all_reduce(large, mean=True).wait()
    thirds = torch.full((5,), 1.0 + 2**-10 * transport.rank, dtype=torch.float16)
    transport.all_reduce(thirds, mean=True).wait()
    transport.close()
    return [large[0].item(), thirds[0].item()]


def test_half_precision_is_averaged_before_it_is_rounded() -> None:
    """The sum of 60,000 on 3 ranks is beyond fp16, the mean is not."""
    assert on_ranks(half_precision_means, 3) == [[60_000.0, 1.0 + 2**-10]] * 3


def unions() -> list[list[bool]]:
    transport = Transport(timeout_s=60)
    rank = transport.rank
    results = [transport.union(flags).wait() for flags in ([rank == 1, False, rank != 0], [], [True] * 300)]
    transport.close()
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_union(world_size: int) -> None:
    """What is true on some rank is true on all."""
    expected = [[world_size > 1, False, world_size > 1], [], [True] * 300]
    assert on_ranks(unions, world_size) == [expected] * world_size


BROADCAST = [torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bfloat16]


def broadcast_all_kinds() -> list[list[int]]:
    transport = Transport(timeout_s=60)
    results = []
    for dtype in BROADCAST:
        flat = torch.full((3,), 1 - transport.rank).to(dtype)
        transport.broadcast(flat).wait()
        results.append(flat.to(torch.complex64).real.int().tolist())
    sent = transport.traffic.bytes_sent["broadcast"]
    transport.close()
    return [*results, [sent]]


def test_any_dtype_can_be_broadcast() -> None:
    rank_0, rank_1 = on_ranks(broadcast_all_kinds, 2)
    assert rank_0[:-1] == rank_1[:-1] == [[1, 1, 1]] * len(BROADCAST)
    assert [rank_0[-1], rank_1[-1]] == [[3 * (1 + 2 + 2 + 1 + 8 + 2)], [0]]


def test_alone_nothing_is_sent() -> None:
    [[*_, sent]] = on_ranks(broadcast_all_kinds, 1)
    assert sent == [0]


def collect_unsafe() -> list[float] | None:
    transport = Transport(timeout_s=60)
    both = torch.arange(6, dtype=torch.bfloat16)
    parts = {"left": both[:3], "right": both[2:]}
    with mock.patch("torch.save", side_effect=AssertionError), mock.patch("torch.load", side_effect=AssertionError):
        states = transport.collect_states({"lr": np.float64(0.5), "tuple": (1, {2}), "tied": [both, both], **parts})
    transport.close()
    for state in states or []:
        assert torch.equal(state["tied"][0], both)
        assert state["tied"][0] is state["tied"][1]
        state["left"][2] = 7  # they share memory, as before
        assert state["right"][0] == state["tied"][0][2] == 7
    return None if states is None else [float(state["lr"]) for state in states]


def test_states_hold_what_a_user_puts_there() -> None:
    """A NumPy number as a learning rate, say: it must neither raise on rank 0 nor leave the others waiting.

    What replaces `torch.save`, to count or to redirect what is written, is not asked.
    """
    assert on_ranks(collect_unsafe, 2) == [[0.5, 0.5], None]


def of_the_host_beside_nccl() -> list[float]:
    transport = Transport(timeout_s=60)
    transport._nccl = transport._exchange = mock.Mock(spec=NcclExchange)
    flats = [torch.full((3,), float(transport.rank + 1)) for _ in range(2)]
    transport.all_reduce(flats[0]).wait()
    transport.reduce_scatter(flats[1], mean=True).wait()
    transport.all_gather(flats[1]).wait()
    transport.close()
    return [flat[-1].item() for flat in flats]


def test_tensors_of_the_host_never_go_to_nccl() -> None:
    """Such as a buffer that a user keeps on the CPU."""
    assert on_ranks(of_the_host_beside_nccl, 2) == [[3.0, 1.5]] * 2


def all_kinds_on_one_rank() -> list[torch.Tensor]:
    transport, results = Transport(timeout_s=60), []
    for dtype in DTYPES:
        for numel in SIZES:
            flat = values(numel, dtype, 0)
            transport.all_reduce(flat, shard_hook=lambda own: own.add_(1)).wait()
            results += [flat.clone(), transport.reduce_scatter(flat).wait().clone(), transport.all_gather(flat).wait()]
    transport.close()
    return results


def all_kinds_without_and_with_an_exchange() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    without = all_kinds_on_one_rank()
    with mock.patch.object(Transport, "_alone", False):
        return without, all_kinds_on_one_rank()


def test_one_rank_gets_what_an_exchange_would_give() -> None:
    [(without, exchanged)] = on_ranks(all_kinds_without_and_with_an_exchange, 1)
    assert all(map(torch.equal, without, exchanged))


def any_order() -> bool:
    transport = Transport(timeout_s=60)
    flats = [values(3000 + i, torch.float32, transport.rank) for i in range(8)]
    handles = [transport.all_reduce(flat) for flat in flats]
    flags = transport.exchange_flags(transport.rank + 3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(transport.rank)).tolist()
    assert flags.wait() == [rank + 3 for rank in range(transport.world_size)]
    for index in order:
        handles[index].wait()
        handles[index].wait()  # again: the same result
    transport.close()
    return all(
        torch.equal(flat, rank_order_sum(3000 + i, torch.float32, transport.world_size)) for i, flat in enumerate(flats)
    )


def test_handles_can_be_waited_for_in_any_order() -> None:
    assert on_ranks(any_order, 4) == [True] * 4


def messages() -> list[float]:
    transport = Transport(timeout_s=60)
    left, right = (transport.rank - 1) % transport.world_size, (transport.rank + 1) % transport.world_size
    received = [torch.empty(4) for _ in range(3)]
    receiving = [transport.recv(tensor, left) for tensor in received]
    sending = [transport.send(torch.full((4,), float(10 * transport.rank + i)), right) for i in range(3)]
    for handle in [*receiving, *sending]:
        handle.wait()
    assert transport.traffic.bytes_sent["send"] == 3 * 16
    states = transport.collect_states({"rank": transport.rank, "x": torch.arange(transport.rank + 1)})
    assert (states is None) == (transport.rank != 0)
    for rank, state in enumerate(states or []):
        assert state["rank"] == rank
        assert torch.equal(state["x"], torch.arange(rank + 1))
    flat = torch.full((5,), float(transport.rank))
    transport.broadcast(flat, src=1).wait()
    assert flat.tolist() == [1.0] * 5
    transport.close()
    return [tensor[0].item() for tensor in received]


def test_messages_keep_their_order_and_objects_arrive() -> None:
    assert on_ranks(messages, 3) == [[20.0, 21.0, 22.0], [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


def count() -> dict[str, dict[str, float]]:
    transport = Transport(timeout_s=60)
    transport.all_reduce(torch.ones(1000)).wait()
    transport.all_reduce(torch.ones(1000), codec="bf16").wait()
    transport.reduce_scatter(torch.ones(1000)).wait()
    transport.exchange_flags(1).wait()
    transport.close()
    return transport.traffic.state_dict()


def test_bytes_are_counted() -> None:
    for state in on_ranks(count, 4):
        half = 750 * 4 + 750 * 2
        assert state["bytes_sent"] == {"all_reduce": 2 * half, "reduce_scatter": 750 * 4, "flags": 3}
        assert set(state["seconds_waited"]) - {"objects"} == set(state["operations"]) == set(state["bytes_sent"])


def open_and_close() -> bool:
    for _ in range(20):
        Transport(timeout_s=60).close()
    return True


def test_a_quick_rank_may_close_at_once() -> None:
    """The others are still connecting then."""
    assert on_ranks(open_and_close, 4) == [True] * 4


def misuse() -> list[tuple[str, str] | None]:
    """What is refused by its settings; and what a closed transport does not wait for."""
    transport, torus = Transport(timeout_s=60), Transport(timeout_s=60, topology="torus2d")
    flat = torch.ones(8)
    outcomes = {
        "timeout_s": raised(lambda: Transport(timeout_s=0)),
        "nccl": raised(lambda: Transport(backend="nccl")),
        "mpi": raised(lambda: Transport(backend="mpi")),
        "1-D": raised(lambda: transport.all_reduce(torch.ones(2, 2))),
        "1-D contiguous": raised(lambda: transport.all_reduce(flat[::2])),
        "int64": raised(lambda: transport.all_reduce(flat.long(), mean=True)),
        "zip": raised(lambda: transport.all_reduce(flat, codec="zip")),
        "part of a shard": raised(lambda: transport.all_gather(flat, codec="int8", part=slice(1))),
        "or on a 2-D torus": raised(lambda: torus.all_gather(flat, part=slice(1))),
    }
    assert_refused(outcomes)
    transport.close()
    torus.close()
    return [raised(lambda: transport.all_reduce(flat).wait()), raised(lambda: transport.union([True]).wait())]


def test_misuse_is_named() -> None:
    for outcome in (outcome for outcomes in on_ranks(misuse, 4) for outcome in outcomes):
        assert outcome is not None
        assert outcome[0] == "RuntimeError"
        assert "closed" in outcome[1]


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Transport()


#: Of one that hangs; of one that dies far more than the test may take.
TIMEOUTS_S = {"dies": 300, "hangs": 10}


def lose_a_peer(how: str, operation: str) -> tuple[str, str] | None:
    be_patient()
    transport = Transport(timeout_s=TIMEOUTS_S[how])
    transport.all_reduce(torch.ones(100)).wait()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    flat = torch.ones(1_000_000)
    outcome = raised(
        lambda: transport.all_reduce(flat).wait() if operation == "all_reduce" else transport.exchange_flags(0).wait()
    )
    transport.close(timeout_s=0)
    if transport.rank == 0 and how == "hangs":
        kill_stopped_siblings()
    return outcome


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("operation", ["all_reduce", "flags"])
def test_a_lost_peer_raises_on_the_others(how: str, operation: str) -> None:
    outcomes = launch(lose_a_peer, 3, how, operation, may_die=(1,))
    assert outcomes[1] == DIED
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome is not None
        kind, message = outcome
        assert kind == "RuntimeError"
        assert message.startswith("Rank 1 (host ")
        assert f"timeout_s={TIMEOUTS_S[how]}" in message
