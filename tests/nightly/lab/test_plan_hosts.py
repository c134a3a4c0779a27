"""Hosts and links: what a plan measures of them, what sticks out, and who does not answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_pipesync.lab.bench import job_sockets, preflight
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.job_sockets import JobSockets
from lightning_pipesync.lab.bench.preflight import HostFacts, exchange_facts, findings
from lightning_pipesync.lab.plan import links as plan_links
from lightning_pipesync.lab.plan.links import Links, measure_links, outliers, partners, several_connections
from tests.support.harness import on_ranks


@pytest.mark.parametrize("world_size", range(2, 10))
def test_each_pair_meets_once(world_size: int) -> None:
    rounds = [partners(rank, world_size) for rank in range(world_size)]
    for rank, of_rank in enumerate(rounds):
        assert sorted(one for one in of_rank if one is not None) == [r for r in range(world_size) if r != rank]
        for number, partner in enumerate(of_rank):
            assert partner is None or rounds[partner][number] == rank


def links(speed: Any, number: int = 4) -> Links:
    bandwidth = [[0.0 if a == b else speed(a, b) for b in range(number)] for a in range(number)]
    return Links(bandwidth, bandwidth)


NAMES = ["host 0", "host 1", "host 2", "host 3"]


@pytest.mark.parametrize(
    ("is_slow", "slow", "words"),
    [
        (lambda a, b: 3 in (a, b), 5e7, ["host 3: 400 Mbit/s to and from the others, which have 960 Mbit/s."]),
        (lambda a, b: b == 1, 5e7, ["host 1: 400 Mbit/s"]),  # in one direction
        (
            lambda a, b: a // 2 != b // 2,
            3e7,
            [
                "The ranks are in 2 racks (0, 1; 2, 3): 240 Mbit/s between them, 960 Mbit/s within.",
                "ranks_per_replica=2",
                "torus_columns=2",
            ],
        ),
        (
            lambda a, b: a % 2 != b % 2,
            3e7,
            ["The ranks are in 2 racks (0, 2; 1, 3): 240 Mbit/s between them", "numbered rack by rack"],
        ),
    ],
    ids=["host", "direction", "racks", "racks in turns"],
)
def test_what_is_slow_is_named(is_slow: Any, slow: float, words: list[str]) -> None:
    (found,) = outliers(links(lambda a, b: slow if is_slow(a, b) else 1.2e8), NAMES)
    assert found.startswith(words[0])
    assert all(word in found for word in words)


def test_strategies_for_racks_are_not_recommended_for_racks_of_other_sizes() -> None:
    speed = links(lambda a, b: 3e7 if (a < 2) != (b < 2) else 1.2e8, 5)
    (found,) = outliers(speed, [f"host {rank}" for rank in range(5)])
    assert "2 racks (0, 1; 2, 3, 4)" in found
    assert "Strategy" not in found


def test_a_slow_pair_is_named() -> None:
    (found,) = outliers(links(lambda a, b: 3e7 if {a, b} == {1, 2} else 1.2e8), NAMES)
    assert found == "host 1 and host 2: 240 Mbit/s, where others have 960 Mbit/s."


def test_equal_links_are_no_finding() -> None:
    assert outliers(links(lambda a, b: 1.2e8 * (1 + 0.05 * a)), NAMES) == []
    assert outliers(links(lambda a, b: 1.2e8, 2), NAMES[:2]) == []


def facts(rank: int, **changed: Any) -> HostFacts:
    usual: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank}",
        "address": f"10.0.0.{rank}",
        "interface": "eth0",
        "mtu": 1500,
        "backend_interface": "eth0",
        "nccl_interfaces": "",
        "cores": 8,
        "threads": 8,
        "versions": {"torch": "2.13.0"},
    }
    return HostFacts(**{**usual, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"backend_interface": "docker0"}, "Gloo uses the interface docker0, but eth0 leads to the other hosts"),
        (
            {"nccl_interfaces": "docker,lo"},
            "NCCL_SOCKET_IFNAME=docker,lo excludes eth0, which leads to the other",
        ),
        ({"nccl_interfaces": "^eth"}, "NCCL_SOCKET_IFNAME=^eth excludes eth0"),
        ({"nccl_interfaces": "=eth"}, "NCCL_SOCKET_IFNAME==eth excludes eth0"),
        ({"mtu": 9000}, "an MTU of 9000, but most hosts have 1500"),
        ({"versions": {"torch": "2.9.0"}}, "torch 2.9.0, but most hosts have 2.13.0"),
        ({"threads": 16}, "1 ranks with 16 threads in all on 8 cores. Set OMP_NUM_THREADS=8"),
    ],
)
def test_what_is_wrong_with_a_host_is_named(changed: dict[str, Any], words: str) -> None:
    ranks = [facts(0, nccl_interfaces="docker,eth"), facts(1, nccl_interfaces="^=docker0"), facts(2, **changed)]
    assert findings(ranks[:2]) == []
    (found,) = findings(ranks)
    assert words in found
    assert "node2" in found


def test_ranks_that_share_a_link_are_named() -> None:
    (found,) = findings([facts(0), facts(1), facts(2, address="10.0.0.1")])
    assert found.startswith("2 ranks have the address 10.0.0.1, whose link they share")


def test_ranks_that_share_cores_are_named() -> None:
    (found,) = findings([facts(rank, host="node", threads=1, cores=2) for rank in range(4)])
    assert found == "Host node: 4 ranks on 2 cores, which they share."


def test_an_interface_that_reaches_nobody_is_refused_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("pipesync/facts/1", json.dumps(asdict(facts(1, backend_interface="lo"))))
    monkeypatch.setattr(preflight, "facts_of_this_host", facts)
    with pytest.raises(
        ValueError, match=r"rank 1 \(node1, 10.0.0.1\): Gloo uses .* lo, .* Set GLOO_SOCKET_IFNAME=eth0"
    ):
        exchange_facts(store, 0, 2)
    store.set("pipesync/facts/1", json.dumps(asdict(facts(1))))
    assert exchange_facts(store, 0, 2) == [facts(0), facts(1)]


def measured_without_rank_1(what: str) -> str:
    """Rank 1 tells its address, and does not answer."""
    with patch.object(job_sockets, "TIMEOUT_S", 1.0):
        said = ""
        if dist.get_rank() == 0:
            try:
                measure_bandwidth() if what == "bandwidth" else measure_links(1e9)
            except RuntimeError as error:
                said = str(error)
            dist.barrier()
        else:
            with JobSockets(backlog=1):
                if what == "links":
                    dist.barrier()
                dist.barrier()  # until rank 0 has given up
    return said


@pytest.mark.parametrize(
    ("what", "words"),
    [("bandwidth", "Rank 0 timed out waiting for rank 1 or 1 (1 s)"), ("links", "Rank 0 does not reach rank 1, at")],
)
def test_who_does_not_answer_is_not_waited_for(what: str, words: str) -> None:
    assert words in on_ranks(measured_without_rank_1, 2, what)[0]


@pytest.mark.parametrize(("several", "found"), [(1.2e9, 0), (2e9, 1)])
def test_several_connections_are_recommended_where_they_carry_more(several: float, found: int) -> None:
    with patch.object(plan_links, "measure_bandwidth", lambda connections, stride: several):
        told = several_connections(1e9)
    assert len(told) == found
    assert all(one.startswith("One TCP connection carries 8 Gbit/s, 4 carry 16 Gbit/s") for one in told)
