"""Large buffers on three and more ranks travel around a ring."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from lightning_pipesync.core.buckets import shard_of
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm import ring
from lightning_pipesync.core.comm.transport import Transport
from tests.quick.core.test_transport import values
from tests.references.pipe_sgd import through
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks


def ring_order_sum(numel: int, world_size: int) -> torch.Tensor:
    """Each slice starts at the rank after its owner; the owner adds its values last."""
    total = torch.empty(numel)
    for owner in range(world_size):
        order = [(owner + 1 + step) % world_size for step in range(world_size)]
        first, *others = (shard_of(values(numel, torch.float32, rank), owner, world_size) for rank in order)
        for contribution in others:
            first = first + contribution
        shard_of(total, owner, world_size).copy_(first)
    return total


SIZES = [1, 2, 5, 30_001, 100_003]


def small_pieces() -> None:
    """Makes few values travel as many would: several pieces a slice, more pieces than the window has room for."""
    ring.MIN_SLICE_BYTES, ring.PIECE_BYTES, ring.WINDOW = 1, 4096, 3


def all_reduce_in_small_pieces() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the sum and the mean of each size."""
    small_pieces()
    transport = Transport(timeout_s=30)
    results = []
    for numel in SIZES:
        total, mean = (values(numel, torch.float32, transport.rank) for _ in range(2))
        transport.all_reduce(total).wait()
        transport.all_reduce(mean, mean=True).wait()
        results.append((total, mean))
    transport.close()
    return results


@pytest.mark.parametrize("world_size", [3, 4])
def test_every_rank_adds_in_its_turn(world_size: int) -> None:
    for results in on_ranks(all_reduce_in_small_pieces, world_size):
        for numel, (total, mean) in zip(SIZES, results, strict=True):
            expected = ring_order_sum(numel, world_size)
            assert torch.equal(total, expected)
            assert torch.equal(mean, expected / world_size)


def large_halves() -> tuple[torch.Tensor, torch.Tensor]:
    transport = Transport(timeout_s=30)
    flat = values(1_000_001, torch.float32, transport.rank)
    own = transport.reduce_scatter(flat).wait().clone()
    transport.all_gather(flat).wait()
    transport.close()
    return own, flat


def test_large_buffers_take_the_ring() -> None:
    expected = ring_order_sum(1_000_001, 3)
    for rank, (own, flat) in enumerate(on_ranks(large_halves, 3)):
        assert torch.equal(own, shard_of(expected, rank, 3))
        assert torch.equal(flat, expected)


def gathered_as(name: str) -> torch.Tensor:
    small_pieces()
    transport = Transport(timeout_s=30)
    flat = values(30_001, torch.float32, transport.rank)
    transport.all_gather(flat, codec=name).wait()
    transport.close()
    return flat


def test_what_is_encoded_is_passed_on_as_it_is() -> None:
    names = ("bf16", "int8", "topk")
    outcomes = launch_cases({name: partial(gathered_as, name) for name in names}, 4)
    for name in names:
        shards = [shard_of(values(30_001, torch.float32, rank), rank, 4) for rank in range(4)]
        parts = [through(get_codec(name), shard, None) for shard in shards]
        for flat in outcomes[name]:
            assert torch.equal(flat, torch.cat(parts))


def both_halves_of_several(num_rounds: int) -> list[bool]:
    small_pieces()
    transport = Transport(timeout_s=20)
    same = []
    for round_ in range(num_rounds):
        reduced = values(30_001, torch.float32, transport.rank)
        gathered = torch.full((30_001,), float(transport.rank))
        first = transport.all_reduce(reduced)
        time.sleep(0.01 * ((transport.rank + round_) % 3))  # the others' first one may be done before the second starts
        second = transport.all_gather(gathered)
        second.wait()
        first.wait()
        same.append(torch.equal(reduced, ring_order_sum(30_001, 3)))
        same.append(all(bool((shard_of(gathered, rank, 3) == rank).all()) for rank in range(3)))
    transport.close()
    return same


def test_rings_move_in_the_same_order_on_all_ranks() -> None:
    for same in on_ranks(both_halves_of_several, 3, 10):
        assert all(same)


def in_the_background() -> bool:
    """Rank 0 waits for its all-reduce only when the others have theirs, to which its slices have to be passed on."""
    small_pieces()
    transport = Transport(timeout_s=20)
    flat = values(30_001, torch.float32, transport.rank)
    handle = transport.all_reduce(flat, background=True)
    if transport.rank != 0:
        handle.wait()
    transport.exchange_flags(0).wait()
    handle.wait()
    transport.close()
    return torch.equal(flat, ring_order_sum(30_001, 3))


def test_a_ring_in_the_background_advances_while_nobody_waits() -> None:
    assert on_ranks(in_the_background, 3) == [True] * 3
