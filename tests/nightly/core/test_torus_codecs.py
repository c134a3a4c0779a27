"""A codec on a torus: the ranks of a row sum values as they are, and the sums travel between rows encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import Fusion, shard_of
from lightning_pipesync.core.codecs import CODECS, get_codec
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.torus import Torus, TorusExchange
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.dear import DeAR
from tests.quick.core.test_nccl import CPU, nccl_on_the_host
from tests.references.pipe_sgd import all_reduce, two_halves
from tests.support.harness import assert_raised, call_on_hosts, on_ranks, raised
from tests.support.models import Run, assert_same

RANKS, COLUMNS, ROUNDS = 4, 2, 3
HOSTS = RANKS // COLUMNS
TORUS = {"topology": "torus2d", "torus_columns": COLUMNS}
NUMELS = [0, 1, 3, 1001, 4096]


def values(numel: int, rank: int, round_: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + 10 * round_ + rank))


def use_nccl(transport: Transport) -> None:
    """Makes a transport use the exchange of NCCL, with groups of Gloo in place."""
    torus = Torus(RANKS, COLUMNS)
    groups = [transport._group_within("gloo", ranks_of) for ranks_of in (torus.row_of, torus.column_of)]
    transport._exchange = TorusExchange(torus, transport.rank, *(NcclExchange(group, CPU) for group in groups))


def averages(codec: str, with_feedback: bool, nccl: bool, numels: list[int]) -> dict[int, tuple[list[Tensor], Tensor]]:
    """Returns by size the average of each round, and what is left of this rank's values."""
    found = {}
    with nccl_on_the_host():
        transport = Transport(timeout_s=30, **TORUS)
        if nccl:
            use_nccl(transport)
        for numel in numels:
            feedback = transport.feedback(torch.zeros(numel)) if with_feedback else None
            rounds = []
            for round_ in range(ROUNDS):
                flat = values(numel, transport.rank, round_)
                if round_ % 2:
                    transport.all_reduce(flat, codec=codec, mean=True, feedback=feedback).wait()
                else:
                    transport.reduce_scatter(flat, codec=codec, mean=True, feedback=feedback).wait()
                    transport.all_gather(flat, codec=codec, feedback=feedback).wait()
                rounds.append(flat)
            found[numel] = rounds, torch.zeros(0) if feedback is None else feedback.contribution
        transport.close()
    return found


@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("with_feedback", [True, False])
@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.lossless])
def test_hosts_exchange_their_sums_once_encoded(codec: str, with_feedback: bool, nccl: bool) -> None:
    # Over NCCL the last shards are padded, of which top-k sends a share.
    numels = [numel for numel in NUMELS if numel % RANKS == 0] if nccl and "topk" in codec else NUMELS
    outcomes = on_ranks(averages, RANKS, codec, with_feedback, nccl, numels)
    for numel in numels:
        flat = torch.zeros(numel)
        shards = [shard_of(shard_of(flat, i, COLUMNS), j, HOSTS).clone() for i in range(COLUMNS) for j in range(HOSTS)]
        dropped = [[flat.clone() for _ in range(HOSTS)], shards] if with_feedback else None
        for round_ in range(ROUNDS):
            of_ranks = [values(numel, rank, round_) for rank in range(RANKS)]
            average = all_reduce if round_ % 2 else two_halves
            expected = average(of_ranks, get_codec(codec), dropped, COLUMNS)
            for outcome in outcomes:
                assert torch.equal(outcome[numel][0][round_], expected), f"{numel} values, round {round_}"
        if dropped is not None:
            left = [outcome[numel][1] for outcome in outcomes]
            for host, residual in enumerate(dropped[0]):
                assert torch.equal(left[host * COLUMNS] + left[host * COLUMNS + 1], residual), "of a host's ranks"


def on_hosts(*names: str) -> tuple[int, int] | None:
    torus = Torus.of_hosts(names)
    return None if torus is None else (torus.rows, torus.columns)


def test_a_row_is_a_host() -> None:
    assert on_hosts("a", "a", "b", "b") == (2, 2)
    assert on_hosts(*"aaabbbcccddd") == (4, 3)
    for others in ("a", "aaaa", "abcd", "abab", "aabbb", "aaabb", "aabc", "abb", "aabbaa", "abba", "aabbc"):
        assert on_hosts(*others) is None, others


def topologies(codecs: list[str]) -> list[str]:
    found = []
    for settings in ({"topology": "auto"}, {"topology": "flat"}, {}):
        transport = Transport(timeout_s=30, codec=codecs[dist.get_rank()], **settings)
        found.append(str(transport.topology))
        transport.close()
    return found


@pytest.mark.parametrize(
    ("ranks_per_host", "codecs", "rows"),
    [
        (2, ["int8"] * 4, True),
        (2, ["none"] * 4, False),
        (2, ["int8", "none", "int8", "int8"], False),  # which the comparison of settings refuses
        (1, ["int8"] * 4, False),
        (3, ["int8"] * 4, False),
        (4, ["int8"] * 4, False),
    ],
)
def test_auto_is_a_torus_of_hosts_if_there_is_a_lossy_codec(ranks_per_host: int, codecs: list[str], rows: bool) -> None:
    expected = ["torus2d with rows of 2 ranks" if rows else "flat", "flat", "flat"]
    assert on_ranks(call_on_hosts, RANKS, ranks_per_host, topologies, codecs) == [expected] * RANKS


def train_with_other_codecs() -> tuple[str, str] | None:
    return raised(lambda: Run(DeAR, compression="none" if dist.get_rank() else "int8"))


def test_ranks_with_other_codecs_are_told_so() -> None:
    for outcome in on_ranks(call_on_hosts, RANKS, 2, train_with_other_codecs):
        assert_raised(outcome, "ValueError", "differ in compression")


def bytes_sent(topology: str, codec: str) -> tuple[int, int, int]:
    """Returns the bytes of this rank's messages, of those to another host, and as they are counted."""
    transport = Transport(timeout_s=30, topology=topology, codec=codec)
    sent: Counter[bool] = Counter()
    start_sending = Messages.start_sending

    def counted(self: Messages, tensor: Tensor, peer: int) -> dist.Work:
        sent[self._ranks[peer] // COLUMNS != transport.rank // COLUMNS] += tensor.nbytes
        return start_sending(self, tensor, peer)

    with patch.object(Messages, "start_sending", counted):
        transport.all_reduce(values(2**14, transport.rank, 0), codec=codec).wait()
    counts = sum(sent.values()), sent[True], transport.bytes_sent
    transport.close()
    return counts


@pytest.mark.parametrize(
    ("topology", "codec", "to_other_hosts"),
    [
        *(("flat", codec, RANKS - COLUMNS) for codec in ("none", "int8")),
        *(("torus2d", codec, HOSTS - 1) for codec in ("none", "int8")),
        ("auto", "int8", HOSTS - 1),
        ("auto", "none", RANKS - COLUMNS),
    ],
)
def test_bytes_that_leave_a_host(topology: str, codec: str, to_other_hosts: int) -> None:
    """Each rank sends shards, in each half: of all ranks of other hosts, or of one rank of each."""
    shard = get_codec(codec).wire_bytes(2**14 // RANKS, torch.float32)
    for sent, leaving, counted in on_ranks(call_on_hosts, RANKS, COLUMNS, bytes_sent, topology, codec):
        assert leaving == 2 * to_other_hosts * shard
        assert counted == sent


@pytest.mark.parametrize(
    ("topology", "leaving", "messages"), [("flat", 2, 1), ("torus2d", HOSTS - 1, COLUMNS), ("tree", None, 2)]
)
def test_bytes_of_gathered_wires(topology: str, leaving: int | None, messages: int) -> None:
    """Each rank sends all that it encodes to each rank of the other host, or its part to the same one; as counted."""
    wire = get_codec("chunked_topk").wire_bytes(2**14 // messages, torch.float32)
    for sent, left, counted in on_ranks(call_on_hosts, RANKS, COLUMNS, bytes_sent, topology, "chunked_topk"):
        assert leaving is None or left == leaving * wire
        assert counted == sent


Dropped = dict[str, Any]


def dropped_by(sync: DeAR) -> Dropped:
    """Returns by parameter what this rank has dropped of gradients, and of its slice of what it has gathered."""
    buckets, rank = sync._fused.buckets, sync.transport.rank
    return {
        name: (values.clone(), bucket.shard_slices(rank).get(name), shards.get(name, {}).get("residual"))
        for bucket in buckets
        for shards in [{key: {"residual": v["residual"].clone()} for key, v in bucket.residuals_of_shard().items()}]
        for name, values in bucket.residuals_of_gradients().items()
    }


def fuse_anew(update: str) -> tuple[list[Dropped], dict[str, Tensor]]:
    """Returns what is dropped before and after buckets change, and the weights later."""
    run = Run(DeAR, update=update, compression="int8", fusion="buffer", bucket_mb=1e-4, **TORUS)
    run.steps(range(3))
    run.sync.synchronize()
    dropped = []
    for bucket_mb in (2e-4, 1.0, 1e-4):
        dropped.append(dropped_by(run.sync))
        run.sync._fused.fuse_anew(Fusion(bucket_mb=bucket_mb))
        dropped.append(dropped_by(run.sync))
        run.steps(range(3))
        run.sync.synchronize()
    return dropped, run.end()


def whole(states: list[Dropped], name: str) -> list[Tensor]:
    """Returns what each host has dropped of a parameter's gradient, and what the owners of its shards have."""
    hosts = [states[first : first + COLUMNS] for first in range(0, RANKS, COLUMNS)]
    of_hosts = [torch.stack([state[name][0] for state in host]) for host in hosts]
    assert all(int((of_host != 0).sum(dim=0).max()) <= 1 for of_host in of_hosts), "each rank has its own slice"
    of_owners = torch.zeros_like(of_hosts[0][0])
    for _, place, residual in (state[name] for state in states):
        if place is not None:
            of_owners[place] += residual
    return [*(of_host.sum(dim=0) for of_host in of_hosts), of_owners]


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_what_a_host_has_dropped_stays_when_buckets_change(update: str) -> None:
    outcomes = on_ranks(fuse_anew, RANKS, update)
    for _, weights in outcomes:
        assert_same(weights, outcomes[0][1])
    moments = list(zip(*(dropped for dropped, _ in outcomes), strict=True))
    for before, after in zip(moments[::2], moments[1::2], strict=True):
        for name in before[0]:
            kept = whole(list(before), name)
            assert all(bool(part.any()) for part in kept)
            assert all(map(torch.equal, kept, whole(list(after), name))), name


def resume_elsewhere() -> list[tuple[str, str] | None]:
    """Loads residuals of one topology in a run with another; and where there are none."""

    def saved(**settings: Any) -> Callable[..., Any]:
        run = Run(DeAR, fusion="buffer", **settings)
        run.step(0)
        run.sync.flush()
        state = run.sync.state_dict()
        run.end()

        def load(former: bool = False, **others: Any) -> None:
            if former:
                del state["settings"]["topology"]
            other = Run(DeAR, fusion="buffer", **{**settings, **others})
            try:
                other.sync.load_state_dict(state)
            finally:
                other.end()

        return load

    flat, torus = saved(compression="int8", topology="flat"), saved(compression="int8", **TORUS)
    plain = saved(compression="int8", error_feedback=False, **TORUS)
    return [
        raised(lambda: flat(former=True)),
        raised(lambda: plain(topology="flat", torus_columns=None)),
        raised(lambda: flat(**TORUS)),
        raised(lambda: torus(topology="flat", torus_columns=None)),
    ]


def test_residuals_are_of_one_topology() -> None:
    for former, without, *refused in on_ranks(resume_elsewhere, RANKS):
        assert former is without is None
        for outcome in refused:
            assert outcome is not None
            assert "'topology': 'flat'" in outcome[1]
            assert "'topology': 'torus2d with rows of 2 ranks'" in outcome[1]
