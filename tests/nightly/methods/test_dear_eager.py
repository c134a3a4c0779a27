"""DeAR's all-gathers under the backward pass on more ranks, and whether all ranks follow the schedule."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.methods.dear import DeAR, eager
from tests.quick.methods.test_dear import STEPS, Schedule, every_bucket_at_once, in_pieces, train_eagerly, whole
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks
from tests.support.models import assert_same

#: By number of ranks and topology: the schedules that are compared with that of the paper.
ON_MORE: dict[tuple[int, str], tuple[Schedule, ...]] = {
    (3, "flat"): (every_bucket_at_once, in_pieces),
    (3, "tree"): (every_bucket_at_once, in_pieces),
    (4, "torus2d"): (every_bucket_at_once,),
}


def test_ranks_stay_together() -> None:
    for (world_size, topology), schedules in ON_MORE.items():
        train = partial(train_eagerly, topology=topology)
        cases: dict[Any, Any] = {one: partial(train, one) for one in schedules}
        outcomes = launch_cases({**cases, "paper": partial(train, every_bucket_at_once, overlap="forward")}, world_size)
        expected, early = outcomes["paper"][0]
        assert early == 0
        for schedule in schedules:
            for weights, early in outcomes[schedule]:
                assert early > 0
                assert_same(weights, expected, (schedule, topology))


def order_of_operations() -> list[str]:
    """Four layers of one bucket each; rank 1's operations are slow to start."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = DeAR(model, optimizer, update="replicated", fusion="none")
    operations: list[str] = []
    places: dict[int, int] = {}

    def recording(kind: str, start: Any) -> Any:
        def run(flat: Tensor, **settings: Any) -> Any:
            time.sleep(0.02 * dist.get_rank())
            if places:
                operations.append(f"{kind} {places[flat.data_ptr()]}")
            return start(flat, **settings)

        return run

    for kind in ("reduce_scatter", "all_gather"):
        setattr(sync.transport, kind, recording(kind, getattr(sync.transport, kind)))
    with patch.object(eager, "choose_early_gathers", lambda buckets, divisible: whole([[], [0], [], []])):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 32).requires_grad_()).sum().backward()
            sync.step()
            if sync.planned and not places:
                sync.synchronize()
                places = {bucket.gradients.flat.data_ptr(): i for i, bucket in enumerate(sync._fused.buckets)}
        sync.flush()
    sync.detach()
    return operations


def test_all_ranks_follow_the_schedule() -> None:
    """Bucket 0 is gathered between the reduce-scatters of buckets 1 and 2, the others as forward needs them."""
    reduced, gathered = ([f"{kind} {i}" for i in range(4)] for kind in ("reduce_scatter", "all_gather"))
    for operations in on_ranks(order_of_operations, 2):
        assert operations[:8] == [*reduced[:2], gathered[0], *reduced[2:], *gathered[:0:-1]]
