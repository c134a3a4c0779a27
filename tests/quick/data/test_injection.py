"""Data injection against a simulation in plain Python, over an in-process transport and over Gloo in threads."""

import math
import queue
import threading
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.torch_private import tree_flatten
from lightning_pipesync.data import DataInjection, adjusted_batch_size
from tests.references.training_data import inject

TIMEOUT_S = 60


def mailboxes(world_size):
    """Transports of all ranks in one process. A send is complete only when the message has been received."""
    boxes = {(src, dst): queue.Queue() for src in range(world_size) for dst in range(world_size)}
    return [Mailbox(boxes, rank, world_size) for rank in range(world_size)]


class Mailbox:
    def __init__(self, boxes, rank, world_size):
        self.boxes, self.rank, self.world_size = boxes, rank, world_size
        self.log = []

    def send(self, tensor, dst):
        self.log.append(("send", dst))
        taken = threading.Event()
        self.boxes[self.rank, dst].put((tensor.clone(), taken))
        return SimpleNamespace(wait=lambda: taken.wait(TIMEOUT_S) or pytest.fail("nobody received the message"))

    def recv(self, tensor, src):
        self.log.append(("recv", src))
        return SimpleNamespace(wait=lambda: self._take(tensor, src))

    def _take(self, tensor, src):
        message, taken = self.boxes[src, self.rank].get(timeout=TIMEOUT_S)
        assert (message.shape, message.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(message)
        taken.set()


class GlooRank:
    """A rank of a Gloo group whose ranks are threads of this process."""

    def __init__(self, store, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=TIMEOUT_S))

    def send(self, tensor, dst):
        return self.group.send([tensor], dst, 0)

    def recv(self, tensor, src):
        return self.group.recv([tensor], src, 0)


def on_all_ranks(function, world_size):
    """Calls function(rank) in a thread a rank, and returns what each returned, or the ValueError that it raised."""

    def outcome(rank):
        try:
            return function(rank)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(outcome, range(world_size)))


def transports(kind, world_size):
    if kind == "mailbox":
        return mailboxes(world_size)
    store = dist.HashStore()
    return on_all_ranks(lambda rank: GlooRank(store, rank, world_size), world_size)


Sample = namedtuple("Sample", ["ids", "mask"])


def make_ids(rank, step):
    """Numbers that tell rank, step and row; how many there are differs between ranks and steps."""
    return torch.arange(1 + (5 * rank + 3 * step) % 7) + 1000 * step + 100_000 * rank


def make_batch(ids):
    """A nested batch with leaves of many types; each leaf's rows are made from the ids."""
    return {
        "images": ids.float()[:, None, None] * torch.ones(2, 3),
        "sample": Sample(ids, ids % 2 == 0),
        "more": [ids.to(torch.bfloat16)[:, None], (ids.to(torch.uint8), ids.to(torch.complex64))],
        "strided": (ids.double()[:, None].expand(-1, 2), torch.stack([ids, -ids], dim=1)[:, 1]),
        "nothing": torch.empty(len(ids), 0),
    }


def assert_same(batch, expected):
    leaves, spec = tree_flatten(batch)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert spec == expected_spec
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert leaf.dtype == expected_leaf.dtype
        assert leaf.shape == expected_leaf.shape
        assert torch.equal(leaf, expected_leaf)


@pytest.mark.parametrize("kind", ["mailbox", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.75, 0.75), (1, 1), (0.25, 0.01)])
def test_matches_the_simulation(kind, world_size, alpha, beta):
    ranks = transports(kind, world_size)
    injections = [DataInjection(alpha, beta, rank, seed=0) for rank in ranks]
    num_steps = 6

    def train(rank):
        return [injections[rank](make_batch(make_ids(rank, step))) for step in range(num_steps)]

    results = on_all_ranks(train, world_size)
    for step in range(num_steps):
        expected = inject([make_ids(rank, step).tolist() for rank in range(world_size)], alpha, beta, step)
        for rank in range(world_size):
            # Making all leaves from the ids checks that rows stay together across leaves.
            assert_same(results[rank][step], make_batch(torch.tensor(expected[rank])))


def test_own_batch_is_left_as_it_was():
    ranks = mailboxes(2)
    batches = [torch.arange(4) + 10 * rank for rank in range(2)]
    results = on_all_ranks(lambda rank: DataInjection(1, 0.5, ranks[rank])(batches[rank]), 2)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert [result.tolist() for result in results] == [[0, 1, 2, 3, 10, 11], [10, 11, 12, 13, 0, 1]]


def test_rounds_and_messages():
    """A header and a payload for each pair, and in each round all receives are posted before the first send."""
    ranks = mailboxes(3)
    on_all_ranks(lambda rank: DataInjection(1, 0.5, ranks[rank])(make_batch(make_ids(rank, 0))), 3)
    for rank in ranks:
        others = [other for other in range(3) if other != rank.rank]
        one_round = [("recv", other) for other in others] + [("send", other) for other in others]
        assert rank.log == one_round * 2


@pytest.mark.parametrize(("alpha", "beta"), [(0, 1), (1, 0), (0, 0), (0.0, 0.5)])
def test_nothing_to_share_is_no_traffic(alpha, beta):
    transport = mailboxes(2)[0]
    injection = DataInjection(alpha, beta, transport)
    batch = {"x": torch.ones(3), "y": "not a tensor"}
    assert injection(batch) is batch
    assert transport.log == []


def test_single_rank_has_nobody_to_share_with():
    transport = mailboxes(1)[0]
    assert DataInjection(0.5, 0.5, transport)(torch.arange(3)).tolist() == [0, 1, 2]
    assert transport.log == []


@pytest.mark.parametrize(("world_size", "alpha", "expected"), [(4, 0.5, 2), (5, 0.5, 3), (10, 0.01, 1), (100, 0.07, 7)])
def test_sharing_ranks(world_size, alpha, expected):
    injections = [DataInjection(alpha, 0.5, rank, seed=3) for rank in mailboxes(world_size)]
    num_steps = 400
    drawn = [injections[0].sharing_ranks(step) for step in range(num_steps)]
    assert all(injection.sharing_ranks(7) == drawn[7] for injection in injections)
    times = Counter()
    for ranks in drawn:
        assert len(ranks) == len(set(ranks)) == expected
        assert ranks == sorted(ranks)
        times.update(ranks)
    # Every rank is drawn about as often as any other: within 5 standard deviations of a binomial.
    chance = expected / world_size
    for rank in range(world_size):
        assert abs(times[rank] - num_steps * chance) < 5 * math.sqrt(num_steps * chance * (1 - chance))
    other_seed = DataInjection(alpha, 0.5, mailboxes(world_size)[0], seed=4)
    assert [other_seed.sharing_ranks(step) for step in range(num_steps)] != drawn


def test_resumed_run_continues_the_draw():
    def train(injections, steps):
        def rank_steps(rank):
            return [injections[rank](torch.arange(4) + 10 * rank).tolist() for _ in steps]

        return on_all_ranks(rank_steps, 3)

    def fresh():
        return [DataInjection(0.3, 0.5, rank) for rank in mailboxes(3)]

    uninterrupted = train(fresh(), range(10))
    first, resumed = fresh(), fresh()
    before = train(first, range(4))
    for old, new in zip(first, resumed, strict=True):
        assert old.state_dict() == {"step": 4}
        new.load_state_dict(old.state_dict())
    after = train(resumed, range(6))
    assert [one + two for one, two in zip(before, after, strict=True)] == uninterrupted
    # The draw does change between steps, or the resumption would prove nothing.
    assert uninterrupted[0][:6] != uninterrupted[0][4:]


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"x": torch.ones(3, 5), "y": torch.arange(3)}, r"float32\[5\]"),
        ({"x": torch.ones(3, 2), "y": torch.arange(3).int()}, r"int32\[\]"),
        ({"x": torch.ones(3, 2)}, r"\['x'\]"),
        ({"y": torch.arange(3), "x": torch.ones(3, 2)}, r"\['y', 'x'\]"),
        ([torch.ones(3, 2), torch.arange(3)], "list"),
    ],
    ids=["shape", "dtype", "missing leaf", "order of keys", "container"],
)
@pytest.mark.parametrize("kind", ["mailbox", "gloo"])
def test_mismatch_raises_on_every_rank_that_meets_it(kind, odd, told):
    ranks = transports(kind, 3)
    usual = {"x": torch.ones(4, 2), "y": torch.arange(4)}
    outcomes = on_all_ranks(lambda rank: DataInjection(1, 0.5, ranks[rank])(odd if rank == 1 else usual), 3)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, ValueError)
        source = 0 if rank == 1 else 1
        assert f"rank {source} has" in str(outcome)
        assert f"rank {rank} has" in str(outcome)
        with pytest.raises(ValueError, match=told):
            raise outcome


@pytest.mark.parametrize(
    ("batch", "error", "told"),
    [
        ({"x": torch.ones(2), "y": [torch.ones(2), "text"]}, TypeError, "leaf 2 .* str"),
        ((None, torch.ones(2)), TypeError, "leaf 0 .* NoneType"),
        ([torch.ones(2), torch.tensor(1)], ValueError, "leaf 1 .* 0-dim Tensor of torch.int64"),
        ([torch.ones(2), torch.ones(3, 1)], ValueError, r"\[2, 3\]"),
        ({}, ValueError, r"\[\]"),
    ],
)
def test_bad_batch_raises_before_any_traffic(batch, error, told):
    transport = mailboxes(2)[0]
    with pytest.raises(error, match=told):
        DataInjection(0.5, 0.5, transport)(batch)
    assert transport.log == []


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_fractions_are_validated(name, value):
    settings = {"alpha": 0.5, "beta": 0.5, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DataInjection(**settings, transport=mailboxes(2)[0])
    with pytest.raises(ValueError, match=f"{name}={value}"):
        adjusted_batch_size(32, **settings, world_size=2)


@pytest.mark.parametrize(
    ("batch_size", "alpha", "beta", "world_size", "expected"),
    [
        # SelSync IV-E: b = 32.
        (32, 0.5, 0.5, 8, 11),
        (32, 0.75, 0.75, 8, 6),
        (32, 0, 0.5, 8, 32),
        (32, 1, 1, 1, 16),
        (2, 1, 1, 100, 1),
    ],
)
def test_adjusted_batch_size(batch_size, alpha, beta, world_size, expected):
    assert adjusted_batch_size(batch_size, alpha, beta, world_size) == expected


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("world_size", 0)])
def test_adjusted_batch_size_validates(name, value):
    settings = {"batch_size": 32, "alpha": 0.5, "beta": 0.5, "world_size": 2, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        adjusted_batch_size(**settings)
