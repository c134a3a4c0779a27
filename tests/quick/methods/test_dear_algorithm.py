"""DeAR's schedules without communication: what starts when, what waits for it, and how long a step would take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lightning_pipesync.core.buckets import MIB, Fusion, plan_buckets
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.lab.predictions.limits import StepCost
from lightning_pipesync.methods.dear.schedule import (
    BucketTimes,
    EarlyGathers,
    MeasuredStep,
    choose_early_gathers,
    gathers_in_gaps,
    simulate_step,
)
from lightning_pipesync.methods.gradients.backpipe import BackPipeSchedule
from lightning_pipesync.methods.gradients.feedpipe import FeedPipeSchedule
from tests.quick.methods.test_dear import whole

BUCKETS = ["ab", "c", "def", "gh"]


@pytest.mark.parametrize("missing", ["", "a", "c", "h", "abc", "abcdefgh"])
def test_a_reduce_scatter_starts_as_early_as_the_order_allows(missing: str) -> None:
    """With the last gradient of its bucket and of all before it, in whatever order they come; missing ones delay."""
    for seed in range(20):
        arrivals = [one for one in random.Random(seed).sample("abcdefgh", 8) if one not in missing]
        schedule = BackPipeSchedule([len(bucket) for bucket in BUCKETS])
        started: list[int] = []
        for i, parameter in enumerate(arrivals):
            [bucket] = [index for index, members in enumerate(BUCKETS) if parameter in members]
            started += schedule.gradient_is_ready(bucket)
            ready = [set(members) <= set(arrivals[: i + 1]) for members in BUCKETS]
            assert started == list(range((*ready, False).index(False)))
        assert started + list(schedule.finish()) == [0, 1, 2, 3]
        assert not schedule.outdated


def test_all_gathers_follow_the_forward_pass() -> None:
    """Each module waits for its own buckets only."""
    schedule = FeedPipeSchedule(["hg", "fd", "e", "cba"], "abcdefgh")
    assert schedule.order == [3, 1, 2, 0], "by the first parameter of each bucket that is needed"
    assert [schedule.awaited(module) for module in ("ab", "cd", "", "x")] == [[3], [3, 1], [], []]


# --- the duration of a step ---------------------------------------------------------------------------------------


def chain(num_buckets: int, ratio: float, sizes: Sequence[float] | None = None) -> list[BucketTimes]:
    """Buckets of a chain of equal layers, with t_ff = 1, t_bp = 2, and an all-reduce of ``ratio`` times their sum."""
    halves = [1.5 * ratio * size / sum(sizes or [1] * num_buckets) for size in sizes or [1] * num_buckets]
    return [
        BucketTimes(2 * (i + 1) / num_buckets, (num_buckets - 1 - i) / num_buckets, half, half)
        for i, half in enumerate(halves)
    ]


def operations(buckets: Sequence[BucketTimes], forward: float, backward: float, early: EarlyGathers | None) -> str:
    """Returns the step's operations, with when they start, and its duration."""
    step = simulate_step(buckets, forward, backward, early)
    letters = {"reduce_scatter": "r", "all_gather": "g"}
    done = [f"{letters[kind]}{bucket} {start:g}" for kind, bucket, start in step.operations]
    return ", ".join([*done, f"all {step.seconds:g}"])


def test_a_step_by_hand() -> None:
    """Three buckets; the network idles between the first two reduce-scatters."""
    buckets = [BucketTimes(1.0, 2.0, 1.0, 1.0), BucketTimes(4.0, 1.0, 1.0, 1.0), BucketTimes(5.0, 0.0, 1.0, 1.0)]
    # The first layer waits for its weights, and no other.
    assert operations(buckets, 3.0, 5.0, None) == "r0 1, r1 4, r2 5, g2 6, g1 7, g0 8, all 10"
    # The last reduce-scatter has to wait for an all-gather.
    early = whole([[0], [1], []])
    assert operations(buckets, 3.0, 5.0, early) == "r0 1, g0 2, r1 4, g1 5, r2 6, g2 7, all 11"
    assert gathers_in_gaps(buckets, share=1.0, pieces=[1, 1, 1]).after == [[0], [], []]


def test_a_step_in_pieces_by_hand() -> None:
    """The all-gather of the first bucket takes 4 s of which 1 is latency; two of its three pieces fit into the gap."""
    buckets = [BucketTimes(1.0, 1.0, 1.0, 4.0, latency=1.0), BucketTimes(6.0, 0.0, 1.0, 1.0, latency=1.0)]
    early = EarlyGathers([3, 1], [[0, 0], []])
    assert gathers_in_gaps(buckets, share=1.0, pieces=[3, 1]) == early
    # The second layer, needed at 8, has its weights at 10.
    assert operations(buckets, 2.0, 6.0, early) == "r0 1, g0 2, g0 4, r1 6, g1 7, g0 8, all 11"
    assert choose_early_gathers([BucketTimes(0.0, 0.0, 0.1, 0.1)]) == EarlyGathers.none(1)


@pytest.mark.parametrize("ratio", [0.25, 0.67, 1.0, 1.33, 4.0])
def test_the_simulated_step_approaches_the_limits(ratio: float) -> None:
    """With many buckets the paper's schedule is Eq. 7, and the eager one is near the least that is possible."""
    cost = StepCost(forward=1.0, backward=2.0, update=0.0, reduce_scatter=1.5 * ratio, all_gather=1.5 * ratio)
    buckets = chain(200, ratio)
    paper = simulate_step(buckets, 1.0, 2.0).seconds
    early = simulate_step(buckets, 1.0, 2.0, choose_early_gathers(buckets)).seconds
    assert cost.two_halves <= paper < cost.two_halves * 1.02
    assert cost.eager <= early < cost.eager * 1.04
    assert early <= paper


@pytest.mark.parametrize("ratio", [0.67, 0.8, 1.0, 1.25, 1.33])
def test_nothing_is_lost_on_another_network_than_was_measured(ratio: float) -> None:
    """Against the paper's schedule."""
    for num_buckets in (3, 5, 8, 13):
        for sizes in (None, [*range(1, num_buckets + 1)], [*range(num_buckets, 0, -1)]):
            measured = chain(num_buckets, ratio, sizes)
            early = choose_early_gathers(measured)
            for network in (0.8, 1.0, 1.25):
                actual = [bucket.on(network) for bucket in measured]
                paper = simulate_step(actual, 1.0, 2.0).seconds
                assert simulate_step(actual, 1.0, 2.0, early).seconds <= paper, (sizes, network)


# --- the sizes of buckets -----------------------------------------------------------------------------------------


def measured_chain(num_layers: int, ratio: float, latency: float, large_first: bool = False) -> MeasuredStep:
    """Equal layers, t_ff = 1 and t_bp = 2, of which the first may have a third of all values."""
    numels = [1000] * num_layers
    if large_first:
        numels[0] = num_layers * 500
    tensors = [torch.empty(numel, dtype=torch.uint8, device="meta") for numel in numels]
    parameters = [NamedParameter(str(i), tensor, str(i), (0, 0)) for i, tensor in enumerate(tensors)]
    per_byte = 1.5 * ratio / sum(numels)

    def halves(members: Sequence[NamedParameter]) -> tuple[float, float]:
        seconds = latency + per_byte * sum(member.tensor.numel() for member in members)
        return seconds, seconds

    ready = {id(t): 2 * (num_layers - i) / num_layers for i, t in enumerate(tensors)}
    needed = {id(t): i / num_layers for i, t in enumerate(tensors)}
    return MeasuredStep(parameters[::-1], ready, needed, halves, latency)


def seconds_with(step: MeasuredStep, fusion: Fusion) -> float:
    buckets = step.buckets(plan_buckets(step.parameters, fusion))
    return simulate_step(buckets, 1.0, 2.0, step.early_gathers(buckets)).seconds


@pytest.mark.parametrize("large_first", [False, True])
@pytest.mark.parametrize("latency", [0.0, 1e-3, 3e-2])
@pytest.mark.parametrize("ratio", [0.1, 0.4, 1.0, 4.0])
def test_chosen_sizes_are_as_good_as_the_best_of_a_grid(ratio: float, latency: float, large_first: bool) -> None:
    """Among all sizes of buckets and edges that double, on the network that was measured."""
    step = measured_chain(60, ratio, latency, large_first)
    total = sum(member.tensor.numel() for member in step.parameters) / MIB
    grid = [Fusion(bucket_mb=total / 2**i, edge_mb=total / 2**j) for i in range(6) for j in range(i, i + 5)]
    best = min(seconds_with(step, fusion) for fusion in grid)
    assert seconds_with(step, step.candidates()[0]) < 1.02 * best


def test_buckets_are_small_where_messages_are_cheap_and_at_the_ends() -> None:
    cheap, costly = (measured_chain(60, 0.4, latency).candidates()[0] for latency in (1e-4, 0.3))
    numbers = [len(plan_buckets(measured_chain(60, 0.4, 0.0).parameters, fusion)) for fusion in (cheap, costly)]
    assert numbers[0] > 4 > numbers[1]
    assert cheap.edge_mb is not None
    assert cheap.bucket_mb is not None
    assert cheap.edge_mb < cheap.bucket_mb


def test_some_candidates_have_fewer_buckets_since_a_bucket_may_cost_more_than_latency() -> None:
    step = measured_chain(60, 0.4, 3e-3)
    numbers = [len(plan_buckets(step.parameters, fusion)) for fusion in step.candidates()]
    assert len(numbers) == 3
    assert numbers == sorted(set(numbers), reverse=True)


def test_parameters_that_were_not_seen_are_ready_last_and_needed_first() -> None:
    step = measured_chain(4, 1.0, 0.0)
    seen = replace(step, ready={}, needed={})
    for bucket in seen.buckets([[parameter] for parameter in step.parameters]):
        assert (bucket.ready, bucket.needed) == (0.0, 0.0)
    assert len(plan_buckets(step.parameters, seen.candidates()[0])) == 1
