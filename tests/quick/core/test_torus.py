"""Collectives on a 2-D torus: rows, then columns."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.dear import DeAR
from tests.quick.methods.test_dear import STEPS, train
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.models import OPTIMIZERS, assert_same, seeded_mlp, train_ddp


def values(numel: int, rank: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + rank))


def by_rows_and_columns(numel: int, world_size: int, columns: int) -> torch.Tensor:
    """The sum of all ranks' values, each row by itself and then the rows; from rank 0 on."""
    rows = []
    for first in range(0, world_size, columns):
        row = values(numel, first)
        for rank in range(first + 1, first + columns):
            row += values(numel, rank)
        rows.append(row)
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total


def both_halves(columns: int | None, numels: list[int]) -> dict[str, list[Any]]:
    transport = Transport(timeout_s=30, topology="torus2d", torus_columns=columns)
    shards, wholes, reduced = [], [], []
    for numel in numels:
        flat = values(numel, transport.rank)
        shard = transport.reduce_scatter(flat).wait()
        assert shard.data_ptr() == transport.shard(flat).data_ptr() or not numel
        shards.append((transport.shard_slice(numel, transport.rank), shard.clone()))
        wholes.append(transport.all_gather(flat).wait().clone())
        flat = values(numel, transport.rank)
        reduced.append(transport.all_reduce(flat, mean=True).wait())
    in_flight = [transport.reduce_scatter(values(numel, transport.rank)) for numel in numels]
    for handle, (_, shard) in zip(in_flight, shards, strict=True):
        assert torch.equal(handle.wait(), shard)
    transport.close()
    return {"shards": shards, "wholes": wholes, "reduced": reduced}


NUMELS = [0, 1, 3, 10, 1001, 200_003]  # the last one travels around rings, where a row has three ranks


@pytest.mark.parametrize(("world_size", "columns"), [(4, None), (6, 3), (6, 2)])
def test_both_halves_sum_by_rows_and_columns(world_size: int, columns: int | None) -> None:
    outcomes = on_ranks(both_halves, world_size, columns, NUMELS)
    for i, numel in enumerate(NUMELS):
        expected = by_rows_and_columns(numel, world_size, columns or 2)
        ring = numel == NUMELS[-1] and world_size == 6
        owned = torch.zeros(numel)
        for outcome in outcomes:
            place, shard = outcome["shards"][i]
            owned[place] += shard
            assert torch.equal(outcome["wholes"][i], outcomes[0]["wholes"][i])
            assert torch.equal(outcome["reduced"][i], outcomes[0]["reduced"][i])
            torch.testing.assert_close(outcome["reduced"][i], expected / world_size)
            if not ring:
                assert torch.equal(outcome["wholes"][i], expected)
        torch.testing.assert_close(owned, expected)


def test_as_square_as_possible() -> None:
    found = [(torus.rows, torus.columns) for torus in (Torus(64, None), Torus(8, None), Torus(6, 2))]
    assert found == [(8, 8), (2, 4), (3, 2)]
    assert Torus(6, 3).row_of(4) == [3, 4, 5]
    assert Torus(6, 3).column_of(4) == [1, 4]


@cache
def trained() -> Outcomes:
    settings = {"topology": "torus2d", "bucket_mb": 1e-4}
    cases = {one: partial(train, "adamw", {**settings, "update": one}) for one in ("sharded", "replicated")}
    return launch_cases({"ddp": partial(train_ddp, "adamw", STEPS), **cases}, 4)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_dear_on_a_torus_is_ddp(update: str) -> None:
    for outcome in trained()[update]:
        assert_same(outcome, trained()["ddp"][0], exact=False)
        assert_same(outcome, trained()[update][0])


def misuse() -> dict[str, Any]:
    model = seeded_mlp()
    sgd = OPTIMIZERS["sgd"](model)
    return {
        "topology": raised(lambda: DeAR(model, sgd, topology="ring")),
        "torus_columns=3": raised(lambda: DeAR(model, sgd, topology="torus2d", torus_columns=3)),
        "The ranks differ": raised(lambda: DeAR(model, sgd, topology="torus2d", torus_columns=2 + dist.get_rank())),
    }


def test_a_torus_that_cannot_be_is_refused_on_all_ranks() -> None:
    for outcomes in on_ranks(misuse, 4):
        assert_refused(outcomes)
    with pytest.raises(ValueError, match=r"topology='torus2d' cannot divide 3 ranks .* use topology='flat'"):
        Torus(3, None)


def halves_at_different_times(topology: str, num_rounds: int) -> bool:
    """On a torus the second direction of the all-gather starts when it is waited for: before the reduce-scatter, or
    after it; on a tree messages are passed on then."""
    transport = Transport(timeout_s=20, topology=topology)
    queue = CommQueue("test", transport.device, transport.traffic)
    same = True
    for round_ in range(num_rounds):
        gathered = torch.full((1003,), float(transport.rank))
        reduced = torch.full((5003,), float(transport.rank))
        queue.submit("all_gather", partial(transport.all_gather, gathered))
        time.sleep(0.01 * ((transport.rank + round_) % 3))
        queue.submit("reduce_scatter", partial(transport.reduce_scatter, reduced))
        queue.wait_all()
        same &= bool((transport.shard(reduced) == sum(range(4))).all())
        for rank in range(4):
            same &= bool((gathered[transport.shard_slice(1003, rank)] == rank).all())
    queue.close(10.0)
    transport.close()
    return same


@pytest.mark.parametrize("topology", ["torus2d", "tree"])
def test_operations_of_a_queue_start_in_the_same_order_on_all_ranks(topology: str) -> None:
    assert on_ranks(halves_at_different_times, 4, topology, 20) == [True] * 4
