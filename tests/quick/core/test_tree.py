"""Reduce and broadcast on a double binary tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.codecs import CODECS, get_codec
from lightning_pipesync.core.comm import tree
from lightning_pipesync.core.comm.messages import CheckedMessages, Messages
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.comm.tree import DoubleTree, TreeExchange
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.methods.dear import DeARConfig
from tests.quick.methods.test_dear import STEPS, train
from tests.references.tree import all_reduce_on_tree, halves_of_sum, ranks_of_trees, residuals_of_roots
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.models import assert_same, train_ddp

T = TypeVar("T")

NUMELS = [0, 1, 2, 3, 1001, 30_001]


@pytest.mark.parametrize("world_size", range(2, 66))
def test_an_inner_node_of_one_tree_is_a_leaf_of_the_other(world_size: int) -> None:
    double = DoubleTree(world_size)
    for one, ranks in zip(double.trees, ranks_of_trees(world_size), strict=True):
        assert one.root == ranks[0]
        for rank in range(world_size):
            messages = 0
            while rank != one.root:
                rank, messages = one.parent[rank], messages + 1
            assert messages <= math.ceil(math.log2(world_size))
    inner = [[rank for rank in range(world_size) if one.children[rank]] for one in double.trees]
    assert {*inner[0]} & {*inner[1]} == ({0} if world_size % 2 else set())
    for rank in range(world_size):
        assert len(double.trees[0].children[rank]) + len(double.trees[1].children[rank]) <= 2
        sent, numel = sum(numel for numel, _ in double.sent_to_reduce(1000, rank)), 1000
        assert sent <= numel
        assert sum(numel for numel, _ in double.sent_to_gather(1000, rank)) <= numel


def values(numel: int, rank: int, round_: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + 10 * round_ + rank)).to(dtype)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes few values travel as many would: more pieces than are received ahead, of which the last one is shorter."""
    monkeypatch.setattr(tree, "LEAST_PIECE_BYTES", 64)
    monkeypatch.setattr(tree, "MOST_PIECE_BYTES", 4096)
    monkeypatch.setattr(tree, "WINDOW", 3)


def on_threads(world_size: int, function: Callable[[TreeExchange, int], T], kind: type[Messages] = Messages) -> list[T]:
    """Calls a function with the exchange of each rank, all in this process."""
    store, timeout = dist.HashStore(), timedelta(seconds=30)
    with patch.object(dist, "get_rank", return_value=0):  # there is no default group
        watch = PeerWatch(timeout)

    def call(rank: int) -> T:
        group = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        return function(TreeExchange(DoubleTree(world_size), group, watch, kind), rank)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(call, range(world_size)))


def both_halves(exchange: TreeExchange, rank: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns of each size this rank's part of the mean, the whole mean, and the sum of an all-reduce."""
    found, none = [], get_codec("none")
    for numel in NUMELS:
        flat = values(numel, rank, dtype=dtype)
        own = exchange.reduce_scatter(flat, none, True, None)().clone()
        found.append((own, exchange.all_gather(flat, none, None)()))
    waiting = [exchange.all_reduce(values(numel, rank, dtype=dtype), none, False, None) for numel in NUMELS]
    return [(*means, wait()) for means, wait in zip(found, waiting, strict=True)]  # all in flight at the same time


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("world_size", range(2, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_reference(world_size: int, dtype: torch.dtype) -> None:
    """Bit for bit: in fp32, of which 16-bit floats are rounded once."""
    outcomes = on_threads(world_size, partial(both_halves, dtype=dtype))
    roots = [ranks[0] for ranks in ranks_of_trees(world_size)]
    for index, numel in enumerate(NUMELS):
        sums = halves_of_sum([values(numel, rank, dtype=dtype).float() for rank in range(world_size)])
        means = [(half / world_size).to(dtype) for half in sums]
        for rank, outcome in enumerate(outcomes):
            own, mean, total = outcome[index]
            assert torch.equal(own, means[roots.index(rank)] if rank in roots else torch.zeros(0, dtype=dtype))
            assert torch.equal(mean, torch.cat(means))
            assert torch.equal(total, torch.cat(sums).to(dtype))


def test_pieces_of_their_usual_size() -> None:
    """A large half travels in 16 pieces, or 4 for each level, or of a MiB each, and a small one whole."""
    numbers = [len(tree.in_pieces(torch.zeros(numel), 4)) for numel in (0, 1, 2**14, 2**14 + 1, 2**20, 2**23)]
    assert numbers == [0, 1, 1, 2, 16, 32]
    assert len(tree.in_pieces(torch.zeros(2**20), 4096)) == 48
    sums = halves_of_sum([values(2**20, rank) for rank in range(3)])
    for total in on_threads(3, lambda one, rank: one.all_reduce(values(2**20, rank), get_codec("none"), False, None)()):
        assert torch.equal(total, torch.cat(sums))


ROUNDS = 3


def averages(exchange: TreeExchange, rank: int, codec: str, with_feedback: bool) -> list[Tensor]:
    found = []
    for numel in NUMELS:
        feedback = ErrorFeedback(torch.zeros(numel), 2) if with_feedback else None
        for round_ in range(ROUNDS):
            flat = values(numel, rank, round_)
            found.append(exchange.all_reduce(flat, get_codec(codec), True, feedback)())
    return found


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("with_feedback", [True, False])
@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.lossless])
def test_roots_encode_sums_once(codec: str, with_feedback: bool) -> None:
    outcomes = on_threads(5, partial(averages, codec=codec, with_feedback=with_feedback))
    index = 0
    for numel in NUMELS:
        dropped = residuals_of_roots(numel) if with_feedback else None
        for round_ in range(ROUNDS):
            of_ranks = [values(numel, rank, round_) for rank in range(5)]
            expected = all_reduce_on_tree(of_ranks, get_codec(codec), dropped)
            for outcome in outcomes:
                assert torch.equal(outcome[index], expected), f"{numel} values, round {round_}"
            index += 1


def test_a_shard_hook_changes_the_halves_of_the_roots() -> None:
    def doubled(exchange: TreeExchange, rank: int) -> Tensor:
        return exchange.all_reduce(values(1001, rank), get_codec("none"), False, None, lambda own: own.mul_(2))()

    expected = 2 * torch.cat(halves_of_sum([values(1001, rank) for rank in range(4)]))
    for total in on_threads(4, doubled):
        assert torch.equal(total, expected)


def gathered_in_parts(exchange: TreeExchange, rank: int) -> Tensor:
    flat, none = torch.zeros(1001), get_codec("none")
    own = DoubleTree(4).shard_slice(1001, rank)
    flat[own] = values(1001, 0)[own]
    for part in (slice(0, 300), slice(300, None)):
        exchange.all_gather(flat, none, None, part)()
    return flat


@pytest.mark.usefixtures("small_pieces")
def test_parts_of_halves_are_gathered() -> None:
    for flat in on_threads(4, gathered_in_parts):
        assert torch.equal(flat, values(1001, 0))


@pytest.mark.usefixtures("small_pieces")
def test_pieces_have_checksums() -> None:
    function = partial(both_halves, dtype=torch.float32)
    checked, unchecked = (on_threads(3, function, kind) for kind in (CheckedMessages, Messages))
    for one, other in zip(checked, unchecked, strict=True):
        for tensors, others in zip(one, other, strict=True):
            assert all(map(torch.equal, tensors, others))


# --- over a transport -------------------------------------------------------------------------------------------------


def bytes_sent(codec: str) -> tuple[int, int]:
    """Returns the bytes of this rank's messages, and as they are counted."""
    transport = Transport(timeout_s=30, topology="tree")
    sent = []
    start_sending = Messages.start_sending

    def counted(self: Messages, tensor: Tensor, peer: int) -> Any:
        sent.append(tensor.nbytes)
        return start_sending(self, tensor, peer)

    Messages.start_sending = counted  # type: ignore[method-assign]
    try:
        transport.all_reduce(values(2**12, transport.rank), codec=codec).wait()
        transport.all_reduce(values(2**12, transport.rank, dtype=torch.bfloat16)).wait()
    finally:
        Messages.start_sending = start_sending  # type: ignore[method-assign]
    found = sum(sent), transport.bytes_sent
    transport.close()
    return found


TRAINED: dict[str, dict[str, Any]] = {
    "none": {"bucket_mb": 1e-4},
    "early": {"fusion": "buffer", "bucket_mb": 1e-4, "overlap": "eager"},
    "forward": {"overlap": "forward", "fusion": "none"},
    "int8": {"compression": "int8", "overlap": "none"},
}


@cache
def cases() -> Outcomes:
    trained = {name: partial(train, "adamw", {"topology": "tree", **settings}) for name, settings in TRAINED.items()}
    counted = {("bytes", codec): partial(bytes_sent, codec) for codec in ("none", "int8")}
    return launch_cases({"ddp": partial(train_ddp, "adamw", STEPS), **trained, **counted}, 4)


@pytest.mark.parametrize("name", TRAINED)
def test_dear_on_a_tree_is_ddp(name: str) -> None:
    for outcome in cases()[name]:
        assert_same(outcome, cases()[name][0])
        if name != "int8":
            assert_same(outcome, cases()["ddp"][0], exact=False)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_bytes_are_counted(codec: str) -> None:
    for sent, counted in cases()["bytes", codec]:
        assert 0 < sent == counted


def test_every_rank_updates_all_weights() -> None:
    for settings in ({}, {"overlap": "forward"}, {"compression": "int8"}):
        assert DeARConfig(topology="tree", **settings).usual_update == "replicated"
    with pytest.raises(ValueError, match=r"update='sharded' needs a shard on every rank, and topology='tree' .* roots"):
        DeARConfig(topology="tree", update="sharded")


def over_nccl() -> tuple[str, str] | None:
    transport = Mock(spec=Transport, backend="nccl", device="cuda:0")
    transport.gather_objects = lambda own: [own, own]
    transport._groups, transport.ranks, transport._control = Mock(), range(2), None
    return raised(lambda: Transport._arrange(transport, "tree", None, False))


def test_nccl_is_refused() -> None:
    assert_raised(over_nccl(), "ValueError", "topology='tree'", "over NCCL", "set topology='flat' or 'torus2d'")
