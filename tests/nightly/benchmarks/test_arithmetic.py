"""The arithmetic of the benchmarks' tables, bounds and emulations, by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import converge_report, timeline
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


def test_time_that_is_hidden() -> None:
    """Forward for 3 s, then communication for 4 s, half of it under 2 s of backward."""
    spans = [("forward", 0, 2), ("forward", 2, 3), ("all-reduce", 3, 6), ("all-reduce", 5, 7), ("backward", 3, 5)]
    spans_as_saved = [{"kind": kind, "number": 0, "start": start, "end": end} for kind, start, end in spans]
    text = timeline.as_markdown({"timelines": [{"name": "one", "spans": spans_as_saved, "steps": [7.0]}]})
    assert "| one | 7000 | 5000 | 4000 | 50% |" in text


def trainings(points: dict[str, list[list[float]]], higher_is_better: bool, target: float) -> dict[str, Any]:
    """Two evaluations, after 10 and 20 steps; one training for each list of qualities."""

    def point(method: str, i: int, quality: float) -> dict[str, float]:
        seconds = (i + 1) * (2.0 if method == "ddp" else 1.0)
        sent = {"mib": 5.0, "consolidation_mib": 0.5 * i}
        return {"steps": 10 * (i + 1), "seconds": seconds, "quality": quality, "spread": 0.01 * (i + 1), **sent}

    runs = [
        {"method": method, "seed": seed, "lssr": 0.5, "points": [point(method, i, q) for i, q in enumerate(qualities)]}
        for method, seeds in points.items()
        for seed, qualities in enumerate(seeds)
    ]
    settings = {"task": "digits", "seeds": [0, 1], "evaluations": 2, "labels_per_worker": 5}
    shared = {"higher_is_better": higher_is_better, "target": target, "world_size": 2}
    return {"settings": settings, "metric": "test accuracy %", "runs": runs, **shared}


def test_rows_of_the_table_of_trainings() -> None:
    qualities = {
        "quick:x=1": [[99.0, 98.0], [99.0, 99.5]],
        "ddp": [[90.0, 98.5], [98.0, 98.5]],
        "lucky": [[99, 1], [1, 2]],
        "alone": [[1, 2], [1, 2]],
    }
    result = trainings(qualities, True, 98.5)
    quick, ddp, lucky = converge_report.rows_of(result)
    assert (quick.steps, quick.seconds, quick.num_reached, quick.speedup) == (10, 1.0, 2, 4.0)
    assert (quick.best, quick.difference, quick.final, quick.spread) == (99.25, 0.75, 98.75, 0.015)
    assert quick.difference_interval == pytest.approx(12.706 * 0.25, rel=1e-4), "of 99 - 98.5 and 99.5 - 98.5"
    assert quick.best_interval == pytest.approx(12.706 * 0.25, rel=1e-4), "Student's t with one degree of freedom"
    assert (ddp.steps, ddp.seconds, ddp.speedup, ddp.difference) == (20, 4.0, 1.0, 0.0)
    assert (lucky.num_reached, lucky.steps, lucky.speedup, lucky.share_of_limit) == (1, None, None, None)
    assert (quick.share_of_limit, ddp.share_of_limit) == (2.0, 0.5), "DDP's 20 steps of 0.1 s"
    quality = "99.25 ± 3.18 | +0.75 ± 3.18 | 98.75 ± 9.53 | 1.50%"
    row = f"| quick: x=1 | 10 | 0.500 | {quality} | 2 of 2 | 5.0 | 100 | 1.0 | 4.00 | 200% |"
    assert row in converge_report.as_markdown([result])
    result = trainings({"ddp": [[7.0, 5.0], [7.0, 5.0]], "worse": [[6.0, 5.5], [6.0, 5.5]]}, False, 6.0)
    ddp, worse = converge_report.rows_of(result)  # of which a lower perplexity is better
    assert (ddp.steps, ddp.best) == (20, 5.0)
    assert (worse.steps, worse.best, worse.difference) == (10, 5.5, -0.5)
