"""A group among ranks of several jobs: a rank that dies holds up no other, and former groups are closed."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from lightning_pipesync.core.comm import line
from lightning_pipesync.core.comm.line import Line, open_store
from lightning_pipesync.core.comm.transport import Transport
from tests.support.harness import assert_raised, on_ranks, raised

TIMEOUT = timedelta(minutes=10)


def dies_between_meeting_and_connecting() -> object:
    """The other rank says that it has come, and does not connect."""
    stores = [open_store(), open_store()]
    dist.PrefixStore("key", stores[0]).set("come/1", "")
    with mock.patch.object(line, "MESH_S", 0.5):
        return raised(lambda: Line([f"localhost:{store.port}" for store in stores], 0, "key", TIMEOUT))


def test_a_rank_that_dies_before_it_connects_holds_up_nobody() -> None:
    [error] = on_ranks(dies_between_meeting_and_connecting, 1, timeout_s=60)
    assert_raised(error, "DistStoreError", "not all have connected")


def change_members() -> tuple[list[int], list[float]]:
    """Returns how many process groups there are after each change of members, and a sum over both shards."""
    transport = Transport(timeout_s=60, replicas=[dist.get_rank()])
    groups, sums = [], []
    for number in range(3):
        store = open_store()
        transport.exchange_with(Line([f"localhost:{store.port}"], 0, str(number), TIMEOUT))
        assert transport.shards is not None
        sums.append(transport.shards.all_reduce(torch.ones(1)).wait().item())
        groups.append(len(dist.distributed_c10d._world.pg_map))
    transport.close()
    return groups, sums


def test_a_change_of_members_leaves_no_groups_behind() -> None:
    for groups, sums in on_ranks(change_members, 2):
        assert groups == groups[:1] * 3
        assert sums == [2.0] * 3
