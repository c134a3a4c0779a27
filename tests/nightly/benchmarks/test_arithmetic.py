"""The arithmetic of the benchmarks' tables, bounds and emulations, by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.baselines.grouped import merged
from benchmarks.collectives import Collectives
from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.push_pull import PushPull
from benchmarks.learners.throughput import gradients_per_second
from benchmarks.pipeline import choice_of
from benchmarks.scaling import ALONE, limit_of_throughput, throughput
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.collectives import tables_of
from lightning_pipesync.methods.servers import ParameterServerConfig
from tests.support.case_table import launch_cases

SLOW = HostSpeeds.parse("100ms", ["3:50%"], None)
#: 1 ms a message, 1 s a MiB on two ranks.
LINK = LinkCost(alpha=1e-3, beta=1 / MIB)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"policy": "sync"}, 2 / 4),
        ({"policy": "k_sync", "k": 3}, 1 / 3),
        ({"policy": "k_batch_sync", "k": 3}, 1 / 3),
        ({"policy": "k_async"}, 2 / 4),
        ({"policy": "async"}, 1 / 3.5),
        ({"policy": "n_softsync", "n": 2}, 1 / 3.5),
        ({"policy": "ssp", "staleness_bound": 2}, 2 / 4),
        ({"policy": "downpour", "n_push": 4, "n_fetch": 2}, 1 / 3.5),
        ({"policy": "diloco", "period": 8}, 2 / 4),
    ],
)
def test_throughput_with_a_slow_host(settings: dict[str, Any], steps: float) -> None:
    """In units of a step at full speed, per gradient."""
    found = gradients_per_second(ParameterServerConfig(**settings), SLOW.of_hosts(4), 2000)
    assert found == pytest.approx(1 / (0.1 * steps), rel=0.01)


@pytest.mark.parametrize(
    ("ready", "mib", "groups"),
    [
        ([0.0, 1.0, 5.0], [0.5, 0.5, 0.5], [1, 1, 1]),  # each all-reduce has ended when the next gradient is ready
        ([0.0, 1.0, 1.2, 5.0], [2.0, 0.5, 0.5, 0.5], [1, 2, 1]),  # two are ready while the first is under way
        ([0.0, 0.001, 0.5], [0.1, 0.1, 0.1], [2, 1]),  # the second is ready within the startup time
        ([0.0, 0.1, 0.2], [4.0, 1.0, 1.0], [1, 2]),
    ],
)
def test_tensors_are_merged_where_a_message_costs_more(ready: list[float], mib: list[float], groups: list[int]) -> None:
    assert merged(ready, [round(size * MIB) for size in mib], LINK, world_size=2) == groups


def test_the_validation_set_chooses() -> None:
    """By the mean over the seeds, among settings that never diverge; the test set has no say."""

    def run(method: str, rate: float, size: int, validation: float, error: float) -> dict[str, Any]:
        before = {"epoch": 1.0, "error": error, "validation": max(validation, 3.5)}
        points = [before, {"epoch": 2.0, "error": error, "validation": validation}]
        named = {"method": method, "learning_rate": rate, "batch_size": size, "seed": 0}
        return {**named, "diverged": validation > 100, "points": points}

    runs = [run("a", 0.1, 4, 3.0, 9.0), run("a", 0.1, 4, 5.0, 11.0)]
    runs += [run("a", 0.2, 4, 6.0, 1.0), run("b", 0.1, 4, 4.5, 2.0)]
    choice = choice_of(runs)
    assert choice is not None
    assert (choice.method, choice.learning_rate, choice.validation, choice.outcome.error) == ("a", 0.1, 4.0, 10.0)
    assert choice.lowest_after == 1.5  # 2 epochs, and 1: the first of two that are the same
    runs.append(run("a", 0.1, 4, 101.0, 0.0))
    choice = choice_of(runs)
    assert choice is not None
    assert (choice.method, choice.validation) == ("b", 4.5)
    assert choice_of(runs[-1:]) is None


def test_throughput_by_hand() -> None:
    """A step of 1 s alone that takes 4 s on 8 workers: twice the samples per second."""
    run = {"seconds": {ALONE: [1.0, 9.0, 1.0], "parameter server": [4.0]}, "limit": {"parameter server": 2.0}}
    assert throughput({"world_size": 8}, run, "parameter server") == 2
    assert limit_of_throughput({"world_size": 8}, run, "parameter server") == 4


def test_what_the_all_reduce_predicts() -> None:
    """1 ms a message and 1 s a MiB, on 4 ranks; a second measured where 1.5 s are predicted is an error of +50%."""
    names = ["all_gather", "all_reduce", "push + pull, central server", "push + pull, servers on half of the ranks"]
    shared = {"codec": "none", "num_bytes": MIB, "seconds": [1.0], "processor_seconds": [1.0], "limit": 0.5}
    rows = [{**shared, "implementation": "ours", "operation": name} for name in names]
    others = [{**rows[1], "implementation": "gloo"}, {**rows[1], "codec": "int8"}]
    errors = {"alpha_error": 0, "beta_error": 0}
    fits = [
        {"implementation": name, "operation": "all_reduce", "alpha": alpha, "beta": 1 / MIB, **errors}
        for name, alpha in (("gloo", 1.0), ("ours", 1e-3))
    ]
    Collectives().add_predictions([*rows, *others], fits, 4)
    assert [row["predicted"] for row in rows] == pytest.approx([0.753, 1.506, 6.002, 3.002])
    assert [row["predicted"] for row in others] == [None, None]
    text = tables_of({"world_size": 4, "bandwidth": 1e6, "rows": [*rows, *others], "fits": fits})
    assert "| ours: push + pull, central server | 6002.0 (+500%) |" in text


def numbers_sent(servers: int) -> int:
    transport = Transport()
    flat = torch.arange(6.0) * 10 ** dist.get_rank()
    exchange = PushPull(transport, flat.numel(), servers)
    exchange.push(flat)
    exchange.pull(flat)
    transport.close()
    assert flat.tolist() == [111.0 * i for i in range(6)]
    return transport.traffic.bytes_sent["send"] // 4


def test_a_push_and_a_pull_through_servers() -> None:
    """Three ranks get the sum; a server sends its shard to both others, and pushes what it does not serve itself."""
    sent = launch_cases({servers: partial(numbers_sent, servers) for servers in (1, 2, 3)}, 3)
    assert [sent[servers] for servers in (1, 2, 3)] == [[12, 6, 6], [9, 9, 6], [8, 8, 8]]
