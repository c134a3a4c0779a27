"""Data injection against a simulation in plain Python, over Gloo between threads of this process."""

from __future__ import annotations

import math
from collections import Counter, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import tree_flatten
from lightning_pipesync.data import DataInjection, adjusted_batch_size
from tests.references.training_data import inject
from tests.support.thread_ranks import ThreadRank, on_threads


class Rank:
    """A rank of a group whose ranks are threads of this process; it logs what it sends and receives."""

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        self.rank, self.world_size, self.group, self.log = rank, world_size, group, []

    def send(self, tensor: Tensor, dst: int) -> Any:
        self.log.append(("send", dst))
        return self.group.send([tensor], dst, 0)

    def recv(self, tensor: Tensor, src: int) -> Any:
        self.log.append(("recv", src))
        return self.group.recv([tensor], src, 0)


def on_all_ranks(function: Callable[[Rank], Any], world_size: int) -> list[Any]:
    """Calls ``function`` on each rank; returns what each has returned, or the ValueError that it raised."""

    def outcome(thread: ThreadRank) -> Any:
        try:
            return function(Rank(thread.rank, world_size, thread.group(range(world_size))))
        except ValueError as error:
            return error

    return on_threads(outcome, world_size)


Sample = namedtuple("Sample", ["ids", "mask"])


def make_ids(rank: int, step: int) -> Tensor:
    """Numbers that tell rank, step and row; how many there are differs between ranks and steps."""
    return torch.arange(1 + (5 * rank + 3 * step) % 7) + 1000 * step + 100_000 * rank


def make_batch(ids: Tensor) -> Any:
    """A nested batch with leaves of many types; each leaf's rows are made from the ids, so that rows stay together."""
    return {
        "images": ids.float()[:, None, None] * torch.ones(2, 3),
        "sample": Sample(ids, ids % 2 == 0),
        "more": [ids.to(torch.bfloat16)[:, None], (ids.to(torch.uint8), ids.to(torch.complex64))],
        "strided": (ids.double()[:, None].expand(-1, 2), torch.stack([ids, -ids], dim=1)[:, 1]),
        "nothing": torch.empty(len(ids), 0),
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.75, 0.75), (1, 1), (0.25, 0.01)])
def test_matches_the_simulation(world_size: int, alpha: float, beta: float) -> None:
    """Also resumed; a rank's own batch stays as it was. In a round all receives are posted before the first send."""
    num_steps, resumed_at = 6, 3

    def train(rank: Rank) -> tuple[list[Any], list[tuple[str, int]]]:
        results, injection = [], DataInjection(alpha, beta, rank, seed=0)
        for step in range(num_steps):
            if step == resumed_at:
                saved = injection.state_dict()
                assert saved == {"step": step}
                injection = DataInjection(alpha, beta, rank, seed=0)
                injection.load_state_dict(saved)
            batch = make_batch(make_ids(rank.rank, step))
            results.append(injection(batch))
            assert torch.equal(batch["sample"].ids, make_ids(rank.rank, step))
        return results, rank.log

    outcomes = on_all_ranks(train, world_size)
    for step in range(num_steps):
        expected = inject([make_ids(rank, step).tolist() for rank in range(world_size)], alpha, beta, step)
        for rank in range(world_size):
            leaves, spec = tree_flatten(outcomes[rank][0][step])
            expected_leaves, expected_spec = tree_flatten(make_batch(torch.tensor(expected[rank])))
            assert spec == expected_spec
            for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
                assert (leaf.dtype, leaf.shape) == (expected_leaf.dtype, expected_leaf.shape)
                assert torch.equal(leaf, expected_leaf)
    if alpha == 1:
        for rank, (_, log) in enumerate(outcomes):  # a header and a payload for each pair
            others = [other for other in range(world_size) if other != rank]
            assert log == [(act, other) for act in ("recv", "send") for other in others] * 2 * num_steps


@pytest.mark.parametrize(("alpha", "beta", "world_size"), [(0, 1, 2), (1, 0, 2), (0.0, 0.5, 2), (0.5, 0.5, 1)])
def test_nothing_to_share_is_no_traffic(alpha: float, beta: float, world_size: int) -> None:
    transport, batch = Rank(0, world_size), {"x": torch.ones(3), "y": torch.arange(3)}
    shared = DataInjection(alpha, beta, transport)(batch)
    assert all(torch.equal(shared[name], batch[name]) for name in batch)
    assert transport.log == []


@pytest.mark.parametrize(("world_size", "alpha", "expected"), [(4, 0.5, 2), (5, 0.5, 3), (10, 0.01, 1), (100, 0.07, 7)])
def test_sharing_ranks(world_size: int, alpha: float, expected: int) -> None:
    """Every rank is drawn about as often as any other: within 5 standard deviations of a binomial."""
    num_steps, times = 400, Counter()
    first, other_seed = (DataInjection(alpha, 0.5, Rank(0, world_size), seed=seed) for seed in (3, 4))
    drawn = [first.sharing_ranks(step) for step in range(num_steps)]
    for ranks in drawn:
        assert len(ranks) == len(set(ranks)) == expected
        assert ranks == sorted(ranks)
        times.update(ranks)
    chance = expected / world_size
    for rank in range(world_size):
        assert abs(times[rank] - num_steps * chance) < 5 * math.sqrt(num_steps * chance * (1 - chance))
    assert [other_seed.sharing_ranks(step) for step in range(num_steps)] != drawn


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
def test_mismatch_raises_on_every_rank_that_meets_it(odd: Any, told: str) -> None:
    usual = {"x": torch.ones(4, 2), "y": torch.arange(4)}
    outcomes = on_all_ranks(lambda rank: DataInjection(1, 0.5, rank)(odd if rank.rank == 1 else usual), 3)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, ValueError)
        assert f"rank {0 if rank == 1 else 1} has" in str(outcome)
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
def test_bad_batch_raises_before_any_traffic(batch: Any, error: type[Exception], told: str) -> None:
    transport = Rank(0, 2)
    with pytest.raises(error, match=told):
        DataInjection(0.5, 0.5, transport)(batch)
    assert transport.log == []


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_fractions_are_validated(name: str, value: float) -> None:
    settings: dict[str, Any] = {"alpha": 0.5, "beta": 0.5, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DataInjection(**settings, transport=Rank(0, 2))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        adjusted_batch_size(32, **settings, world_size=2)


@pytest.mark.parametrize(
    ("batch_size", "alpha", "beta", "world_size", "expected"),
    [
        (32, 0.5, 0.5, 8, 11),  # SelSync, IV-E: b = 32
        (32, 0.75, 0.75, 8, 6),
        (32, 0, 0.5, 8, 32),
        (32, 1, 1, 1, 16),
        (2, 1, 1, 100, 1),
    ],
)
def test_adjusted_batch_size(batch_size: int, alpha: float, beta: float, world_size: int, expected: int) -> None:
    assert adjusted_batch_size(batch_size, alpha, beta, world_size) == expected
    for name in ("batch_size", "world_size"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            adjusted_batch_size(**{"batch_size": 32, "alpha": 0.5, "beta": 0.5, "world_size": 2, name: 0})
