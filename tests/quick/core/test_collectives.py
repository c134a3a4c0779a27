"""Collectives of real Gloo groups, flat, in rings, on a torus and on trees, against sums by hand."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shard_numel, shard_of
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm import hops, tree
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.comm.tree import DoubleTree
from tests.references.collectives import (
    BROADCAST,
    DTYPES,
    LOSSY,
    SIZES,
    of_ranks,
    rank_order_sum,
    ring_order_sum,
    sum_by_rows_and_columns,
    values,
    wide,
)
from tests.references.pipe_sgd import all_reduce, through, two_halves
from tests.references.tree import all_reduce_on_tree, halves_of_sum, ranks_of_trees, residuals_of_roots
from tests.support.harness import assert_raised, assert_refused, raised
from tests.support.thread_ranks import ThreadRank, on_threads, with_collectives

FP32 = torch.float32
ROUNDS = 3


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes few values travel in rings and on trees as many would: in more pieces than are received ahead."""
    for module, settings in (
        (hops, {"MIN_SLICE_BYTES": 1, "PIECE_BYTES": 4096, "WINDOW": 3}),
        (tree, {"LEAST_PIECE_BYTES": 64, "MOST_PIECE_BYTES": 4096, "WINDOW": 3}),
    ):
        for name, value in settings.items():
            monkeypatch.setattr(module, name, value)


# --- sums ---


def all_kinds(group: Collectives, cases: list[tuple[int, torch.dtype]], mean: bool = False) -> list[list[Tensor]]:
    """Returns by size and dtype an all-reduce, this rank's slice of a reduce-scatter, and then an all-gather."""
    found = []
    for numel, dtype in cases:
        whole, flat = (values(numel, dtype, group.rank) for _ in range(2))
        group.all_reduce(whole, mean=mean).wait()
        own = group.reduce_scatter(flat, mean=mean).wait()
        assert own.data_ptr() == group.shard(flat).data_ptr() or not own.numel()
        found.append([whole, own.clone(), group.all_gather(flat).wait()])
    return found


def assert_sums(of_all: list[list[list[Tensor]]], expected: list[Tensor]) -> None:
    for rank, found in enumerate(of_all):
        for (whole, own, gathered), total in zip(found, expected, strict=True):
            assert torch.equal(whole, total)
            assert torch.equal(own, shard_of(total, rank, len(of_all)))
            assert torch.equal(gathered, total)


@pytest.mark.parametrize(("world_size", "window"), [(1, None), (2, None), (3, None), (4, None), (4, 1)])
def test_sums_are_in_the_order_of_the_ranks(
    world_size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every dtype; 16-bit floats are summed in fp32, and rounded once."""
    if window is not None:
        monkeypatch.setattr(hops, "MOST_STEPS", window)
        monkeypatch.setattr(hops, "LEAST_STEPS", window)
    cases = [(numel, dtype) for dtype in DTYPES for numel in SIZES]
    found = with_collectives(all_kinds, world_size, cases)
    assert_sums(found, [rank_order_sum(*case, world_size) for case in cases])


def test_means_are_rounded_after_the_division() -> None:
    """The sum of 60,000 on 3 ranks is beyond fp16, the mean is not."""

    def means(group: Collectives) -> list[float]:
        flats = [torch.full((5,), x, dtype=torch.float16) for x in (60_000.0, 1.0 + 2**-10 * group.rank)]
        return [group.all_reduce(flat, mean=True).wait()[0].item() for flat in flats]

    assert with_collectives(means, 3) == [[60_000.0, 1.0 + 2**-10]] * 3


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("world_size", [3, 4])
def test_in_a_ring_every_rank_adds_in_its_turn(world_size: int) -> None:
    sizes = [1, 2, 5, 30_001, 100_003]
    for mean in (False, True):
        found = with_collectives(all_kinds, world_size, [(numel, FP32) for numel in sizes], mean)
        assert_sums(found, [ring_order_sum(numel, world_size) / (world_size if mean else 1) for numel in sizes])


def test_large_buffers_take_the_ring() -> None:
    assert_sums(with_collectives(all_kinds, 3, [(1_000_001, FP32)]), [ring_order_sum(1_000_001, 3)])


@pytest.mark.parametrize(("world_size", "columns"), [(4, None), (6, 3), (6, 2)])
def test_a_torus_sums_rows_and_then_columns(world_size: int, columns: int | None) -> None:
    numels = [0, 1, 3, 10, 1001, 200_003]  # the last one travels in rings, where a row has three ranks

    def with_places(group: Collectives) -> list[tuple[slice, list[Tensor]]]:
        places = [group.shard_slice(numel, group.rank) for numel in numels]
        return list(zip(places, all_kinds(group, [(numel, FP32) for numel in numels]), strict=True))

    outcomes = with_collectives(with_places, world_size, topology="torus2d", columns=columns)
    for index, numel in enumerate(numels):
        expected, owned = sum_by_rows_and_columns(numel, world_size, columns or 2), torch.zeros(numel)
        for place, (whole, own, gathered) in (outcome[index] for outcome in outcomes):
            owned[place] += own
            for found in (whole, gathered):
                assert torch.equal(found, outcomes[0][index][1][0])
                torch.testing.assert_close(found, expected)
            if numel < 200_000 or world_size == 4:
                assert torch.equal(whole, expected)
        torch.testing.assert_close(owned, expected)


def test_a_torus_is_as_square_as_possible_or_has_a_row_for_each_host() -> None:
    found = [(torus.rows, torus.columns) for torus in (Torus(64, None), Torus(8, None), Torus(6, 2))]
    assert found == [(8, 8), (2, 4), (3, 2)]
    assert (Torus(6, 3).row_of(4), Torus(6, 3).column_of(4)) == ([3, 4, 5], [1, 4])
    with pytest.raises(ValueError, match=r"topology='torus2d' cannot divide 3 ranks .* use topology='flat'"):
        Torus(3, None)
    for hosts, rows, columns in (("aabb", 2, 2), ("aaabbbcccddd", 4, 3)):
        torus = Torus.of_hosts([*hosts])
        assert torus is not None
        assert (torus.rows, torus.columns) == (rows, columns)
    for others in ("a", "aaaa", "abcd", "abab", "aabbb", "aaabb", "aabc", "abb", "aabbaa", "abba", "aabbc"):
        assert Torus.of_hosts([*others]) is None, others


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_sum_as_the_reference_does(world_size: int, dtype: torch.dtype) -> None:
    cases = [(numel, dtype) for numel in (0, 1, 2, 3, 1001, 30_001)]
    outcomes = with_collectives(all_kinds, world_size, cases, topology="tree")
    roots = [ranks[0] for ranks in ranks_of_trees(world_size)]
    for index, (numel, _) in enumerate(cases):
        sums = [
            half.to(dtype) for half in halves_of_sum([x.to(wide(dtype)) for x in of_ranks(numel, world_size, dtype)])
        ]
        for rank, outcome in enumerate(outcomes):
            whole, own, gathered = outcome[index]
            assert torch.equal(own, sums[roots.index(rank)] if rank in roots else torch.zeros(0, dtype=dtype))
            assert torch.equal(whole, torch.cat(sums))
            assert torch.equal(gathered, torch.cat(sums))


def test_an_inner_node_of_one_tree_is_a_leaf_of_the_other() -> None:
    for world_size in range(2, 66):
        double = DoubleTree(world_size)
        for one, ranks in zip(double.trees, ranks_of_trees(world_size), strict=True):
            assert one.root == ranks[0]
            for rank in range(world_size):
                messages = 0
                while rank != one.root:
                    rank, messages = one.parent[rank], messages + 1
                assert messages <= math.ceil(math.log2(world_size))
        inner = [{rank for rank in range(world_size) if one.children[rank]} for one in double.trees]
        assert inner[0] & inner[1] == ({0} if world_size % 2 else set())


def test_a_large_half_travels_on_a_tree_in_pieces() -> None:
    """16 pieces, or 4 for each level, or of a MiB each; a small one is whole."""

    def num_pieces(numel: int, world_size: int) -> int:
        return len(hops.in_pieces(torch.zeros(numel), tree.piece_bytes(4 * numel, world_size)))

    numbers = [num_pieces(numel, 4) for numel in (0, 1, 2**14, 2**14 + 1, 2**20, 2**23)]
    assert numbers == [0, 1, 1, 2, 16, 32]
    assert num_pieces(2**20, 4096) == 48
    total = torch.cat(halves_of_sum(of_ranks(2**20, 3)))
    for [[found, *_]] in with_collectives(all_kinds, 3, [(2**20, FP32)], topology="tree"):
        assert torch.equal(found, total)


# --- codecs ---

#: Topology, ranks, and ranks in a row, whose values are summed before they are encoded.
ENCODED = [("flat", 2, 1), ("flat", 3, 1), ("torus2d", 4, 2), ("tree", 5, 1)]


NUMELS = [1, 5000]


def averages(group: Collectives) -> dict[tuple[str, bool, int], tuple[list[Tensor], Tensor]]:
    """Returns by codec, error feedback and size the average of each round, and this rank's residual.

    Rounds are at once, or in two halves, in turns.
    """
    found = {}
    for codec, with_feedback, numel in product(LOSSY, (True, False), NUMELS):
        feedback = group.feedback(torch.zeros(numel)) if with_feedback else None
        rounds = []
        for round_ in range(ROUNDS if with_feedback else 2):
            flat = values(numel, FP32, group.rank, round_)
            if round_ % 2 or group.topology.sends_sums:
                group.all_reduce(flat, codec=codec, mean=True, feedback=feedback).wait()
            else:
                group.reduce_scatter(flat, codec=codec, mean=True, feedback=feedback).wait()
                group.all_gather(flat, codec=codec, feedback=feedback).wait()
            rounds.append(flat)
        found[codec, with_feedback, numel] = rounds, torch.zeros(0) if feedback is None else feedback.contribution
    return found


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("topology", "world_size", "columns"), ENCODED)
def test_each_half_is_encoded_once(topology: str, world_size: int, columns: int) -> None:
    """By each rank, by each row of a torus, or on a tree only once; what is dropped comes with the next values."""
    arrangement = {"topology": topology, "columns": columns if topology == "torus2d" else None}
    outcomes = with_collectives(averages, world_size, **arrangement)
    hosts = world_size // columns
    for key in outcomes[0]:
        codec, (_, with_feedback, numel), flat = get_codec(key[0]), key, torch.zeros(key[2])
        shards = [shard_of(shard_of(flat, i, columns), j, hosts).clone() for i in range(columns) for j in range(hosts)]
        dropped = [[flat.clone() for _ in range(hosts)], shards] if with_feedback else None
        on_tree = residuals_of_roots(numel) if with_feedback else None
        for round_ in range(ROUNDS if with_feedback else 2):
            given = of_ranks(numel, world_size, round_=round_)
            if topology == "tree":
                expected = all_reduce_on_tree(given, codec, on_tree)
            else:
                expected = (all_reduce if round_ % 2 else two_halves)(given, codec, dropped, columns)
            for outcome in outcomes:
                assert torch.equal(outcome[key][0][round_], expected), (key, round_)
        for host, residual in enumerate(dropped[0] if dropped is not None and topology != "tree" else ()):
            left = [outcome[key][1] for outcome in outcomes[host * columns : (host + 1) * columns]]
            assert torch.equal(sum(left[1:], left[0]), residual), key


@pytest.mark.usefixtures("small_pieces")
def test_a_ring_passes_on_what_is_encoded_as_it_is() -> None:
    for name in ("bf16", "int8", "topk"):
        expected = [through(get_codec(name), shard_of(x, i, 4), None) for i, x in enumerate(of_ranks(30_001, 4))]
        gather = partial(
            lambda group, name: group.all_gather(values(30_001, FP32, group.rank), codec=name).wait(), name=name
        )
        for flat in with_collectives(gather, 4):
            assert torch.equal(flat, torch.cat(expected))


# --- parts, hooks, orders ---


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("topology", "world_size"), [("flat", 2), ("flat", 3), ("flat", 4), ("tree", 4)])
def test_parts_of_shards_are_gathered(topology: str, world_size: int) -> None:
    """Two parts, both in flight at once, and not the third."""

    def gather(group: Collectives, numel: int) -> tuple[Tensor, int]:
        flat, size = torch.full((numel,), -1.0), shard_numel(numel, group.topology.num_shards)
        group.shard(flat).fill_(group.rank)
        handles = [group.all_gather(flat, part=part) for part in (slice(0, size // 3), slice(size // 3, size // 2))]
        for handle in handles:
            handle.wait()
        return flat, group.bytes_sent

    roots = [ranks[0] for ranks in ranks_of_trees(world_size)] if topology == "tree" else range(world_size)
    for numel in (3, 1001, 40_003):
        size = shard_numel(numel, len(roots))
        for rank, (flat, sent) in enumerate(with_collectives(gather, world_size, numel, topology=topology)):
            for index, owner in enumerate(roots):
                shard = shard_of(flat, index, len(roots))
                assert (shard[: size // 2] == owner).all()
                assert (shard[size // 2 :] == (owner if owner == rank else -1)).all()
            if topology == "flat":
                assert sent == shard_of(flat, rank, world_size)[: size // 2].nbytes * (world_size - 1)


@pytest.mark.parametrize(("topology", "world_size"), [("flat", 1), ("flat", 3), ("torus2d", 4), ("tree", 4)])
def test_a_hook_changes_the_shards_of_the_sum(topology: str, world_size: int) -> None:
    def doubled(group: Collectives) -> Tensor:
        return group.all_reduce(values(1001, FP32, group.rank), shard_hook=lambda own: own.mul_(2)).wait()

    def usual(group: Collectives) -> Tensor:
        return group.all_reduce(values(1001, FP32, group.rank)).wait()

    found, expected = (with_collectives(f, world_size, topology=topology) for f in (doubled, usual))
    assert all(torch.equal(one, 2 * other) for one, other in zip(found, expected, strict=True))


def test_handles_can_be_waited_for_in_any_order() -> None:
    def any_order(group: Collectives) -> list[Tensor]:
        flats = [values(3000 + i, FP32, group.rank) for i in range(8)]
        handles = [group.all_reduce(flat) for flat in flats]
        flags = group.exchange_flags(group.rank + 3)
        assert flags.wait() == [rank + 3 for rank in range(4)]
        for index in torch.randperm(8, generator=torch.Generator().manual_seed(group.rank)).tolist():
            handles[index].wait()
            handles[index].wait()  # again: the same result
        return flats

    for flats in with_collectives(any_order, 4):
        assert all(torch.equal(flat, rank_order_sum(3000 + i, FP32, 4)) for i, flat in enumerate(flats))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("topology", ["flat", "torus2d", "tree"])
@pytest.mark.parametrize("by_queue", [False, True])
def test_operations_move_in_the_same_order_on_all_ranks(topology: str, by_queue: bool) -> None:
    """A ring's slices, a torus' second direction and a tree's messages move while a rank waits, whenever that is."""

    def halves(group: Collectives) -> bool:
        queue, same = CommQueue("test", torch.device("cpu"), group.traffic), True
        submit = queue.submit if by_queue else lambda _, start: start()
        for round_ in range(6):
            gathered, reduced = (torch.full((numel,), float(group.rank)) for numel in (1003, 5003))
            second = submit("all_gather", partial(group.all_gather, gathered))
            time.sleep(0.01 * ((group.rank + round_) % 3))  # the first may be done before others start the second
            first = submit("reduce_scatter", partial(group.reduce_scatter, reduced))
            if by_queue:
                queue.wait_all()
            else:  # on a torus in the order of the calls
                for handle in (second, first) if topology == "torus2d" else (first, second):
                    handle.wait()
            same &= bool((group.shard(reduced) == sum(range(4))).all())
            same &= all(bool((gathered[group.shard_slice(1003, rank)] == rank).all()) for rank in range(4))
        queue.close(60)
        return same

    assert with_collectives(halves, 4, topology=topology) == [True] * 4


@pytest.mark.usefixtures("small_pieces")
def test_a_ring_in_the_background_advances_while_nobody_waits() -> None:
    def in_the_background(group: Collectives) -> Tensor:
        flat = values(30_001, FP32, group.rank)
        handle = group.all_reduce(flat, background=True)
        if group.rank != 0:  # rank 0 waits when the others have theirs, to which its slices have to be passed on
            handle.wait()
        group.exchange_flags(0).wait()
        handle.wait()
        return flat

    for flat in with_collectives(in_the_background, 3):
        assert torch.equal(flat, ring_order_sum(30_001, 3))


# --- what is sent ---


@pytest.mark.parametrize("world_size", [1, 3])
def test_flags_unions_and_broadcasts(world_size: int) -> None:
    """What is true on some rank is true on all; any dtype can be broadcast, and is counted at its source."""

    def exchange(group: Collectives) -> dict[str, Any]:
        flags = [[group.rank == 1, False, group.rank != 0], [], [True] * 300]
        found: dict[str, Any] = {"union": [group.union(one).wait() for one in flags]}
        flats = [torch.full((3,), 1 - group.rank).to(dtype) for dtype in BROADCAST]
        for flat in flats:
            group.broadcast(flat).wait()
        found["broadcast"] = [flat.to(torch.complex64).real.int().tolist() for flat in flats]
        return {**found, "sent": group.traffic.bytes_sent["broadcast"]}

    several = world_size > 1
    for rank, found in enumerate(with_collectives(exchange, world_size)):
        assert found["union"] == [[several, False, several], [], [True] * 300]
        assert found["broadcast"] == [[1, 1, 1]] * len(BROADCAST)
        assert found["sent"] == (3 * (1 + 2 + 2 + 1 + 8 + 2) if several and rank == 0 else 0)


def bytes_of(rank: ThreadRank, topology: str, codec: str, sent: Counter[int]) -> tuple[int, int]:
    """Returns the bytes of this rank's messages, and as they are counted."""
    group = rank.collectives(topology)
    group.all_reduce(values(2**12, FP32, group.rank), codec=codec).wait()
    group.all_reduce(values(2**12, torch.bfloat16, group.rank)).wait()
    group.exchange_flags(1).wait()
    group.close()
    assert set(group.traffic.seconds_waited) == set(group.traffic.bytes_sent) == {"all_reduce", "flags"}
    return sent[threading.get_ident()], group.bytes_sent


@pytest.mark.parametrize("topology", ["flat", "torus2d", "tree"])
@pytest.mark.parametrize("codec", ["none", "int8", "chunked_topk"])
def test_bytes_are_counted(topology: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[int] = Counter()
    send = Messages.start_sending

    def start_sending(messages: Messages, tensor: Tensor, peer: int) -> Any:
        sent[threading.get_ident()] += tensor.nbytes
        return send(messages, tensor, peer)

    monkeypatch.setattr(Messages, "start_sending", start_sending)
    for of_rank, counted in on_threads(bytes_of, 4, topology, codec, sent):
        assert 0 < of_rank == counted
    if (topology, codec) == ("flat", "none"):
        assert of_rank == 2 * 3 * 2**10 * (4 + 2) + 3


def test_misuse_is_named() -> None:
    def misuse(group: Collectives) -> list[Any]:
        flat = torch.ones(8)
        outcomes = {
            "1-D": raised(lambda: group.all_reduce(torch.ones(2, 2))),
            "1-D contiguous": raised(lambda: group.all_reduce(flat[::2])),
            "int64": raised(lambda: group.all_reduce(flat.long(), mean=True)),
            "zip": raised(lambda: group.all_reduce(flat, codec="zip")),
            "part of a shard": raised(lambda: group.all_gather(flat, codec="int8", part=slice(1))),
        }
        if isinstance(group.topology, Torus):
            outcomes["or on a 2-D torus"] = raised(lambda: group.all_gather(flat, part=slice(1)))
        assert_refused(outcomes)
        group.close()
        return [raised(lambda: group.all_reduce(flat).wait()), raised(lambda: group.union([True]).wait())]

    for topology in ("flat", "torus2d"):
        for outcomes in with_collectives(misuse, 4, topology=topology):
            for outcome in outcomes:
                assert_raised(outcome, "RuntimeError", "closed")
