"""All-gathers under backward: the schedule, and what is trained with any of them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.cost import StepCost
from lightning_pipesync.core.schedule import BucketTimes, EarlyGathers, simulate_step
from lightning_pipesync.methods.dear import DeAR, eager
from lightning_pipesync.methods.dear.eager import choose_early_gathers, gathers_in_gaps
from lightning_pipesync.methods.gradients.execution_order import StepTimes
from tests.support.harness import on_ranks
from tests.support.models import OPTIMIZERS, Averaged, Run, assert_same, batch, loss, seeded_mlp

STEPS = 10


def whole(after: Sequence[Sequence[int]]) -> EarlyGathers:
    """All-gathers of whole buckets."""
    return EarlyGathers([1] * len(after), after)


def chain(num_buckets: int, ratio: float, sizes: Sequence[float] | None = None) -> list[BucketTimes]:
    """Buckets of a chain of equal layers, with t_ff = 1, t_bp = 2, and an all-reduce of ``ratio`` times their sum."""
    shares = [size / sum(sizes) for size in sizes] if sizes else [1 / num_buckets] * num_buckets
    return [
        BucketTimes(
            ready=2 * (i + 1) / num_buckets,
            needed=(num_buckets - 1 - i) / num_buckets,
            reduce_scatter=1.5 * ratio * share,
            all_gather=1.5 * ratio * share,
        )
        for i, share in enumerate(shares)
    ]


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.33, 2.0, 4.0])
def test_the_simulated_step_approaches_the_limits(ratio: float) -> None:
    """With many buckets the paper's schedule is Eq. 7, and the eager one is near the least that is possible."""
    cost = StepCost(forward=1.0, backward=2.0, update=0.0, reduce_scatter=1.5 * ratio, all_gather=1.5 * ratio)
    buckets = chain(200, ratio)
    paper = simulate_step(buckets, 1.0, 2.0).seconds
    early = simulate_step(buckets, 1.0, 2.0, choose_early_gathers(buckets)).seconds
    assert cost.two_halves <= paper < cost.two_halves * 1.02
    assert cost.eager <= early < cost.eager * 1.04
    assert early <= paper


def test_a_step_by_hand() -> None:
    """Three buckets; the network idles between the first two reduce-scatters."""
    buckets = [BucketTimes(1.0, 2.0, 1.0, 1.0), BucketTimes(4.0, 1.0, 1.0, 1.0), BucketTimes(5.0, 0.0, 1.0, 1.0)]
    paper = simulate_step(buckets, forward=3.0, backward=5.0)
    assert [(o.kind, o.bucket, o.start) for o in paper.operations] == [
        ("reduce_scatter", 0, 1.0),
        ("reduce_scatter", 1, 4.0),
        ("reduce_scatter", 2, 5.0),
        ("all_gather", 2, 6.0),
        ("all_gather", 1, 7.0),
        ("all_gather", 0, 8.0),
    ]
    assert paper.seconds == 6.0 + 1.0 + 3.0, "the first layer waits for its weights, and no other"
    early = simulate_step(buckets, forward=3.0, backward=5.0, early=whole([[0], [1], []]))
    assert [(o.kind, o.bucket, o.start) for o in early.operations] == [
        ("reduce_scatter", 0, 1.0),
        ("all_gather", 0, 2.0),
        ("reduce_scatter", 1, 4.0),
        ("all_gather", 1, 5.0),
        ("reduce_scatter", 2, 6.0),
        ("all_gather", 2, 7.0),
    ]
    assert early.seconds == 7.0 + 1.0 + 3.0, "the last reduce-scatter had to wait for an all-gather"
    assert gathers_in_gaps(buckets, share=1.0, pieces=[1, 1, 1]).after == [[0], [], []]


def test_a_step_in_pieces_by_hand() -> None:
    """The all-gather of the first bucket takes 4 s of which 1 is latency; two of its three pieces fit into the gap."""
    buckets = [BucketTimes(1.0, 1.0, 1.0, 4.0, latency=1.0), BucketTimes(6.0, 0.0, 1.0, 1.0, latency=1.0)]
    early = EarlyGathers([3, 1], [[0, 0], []])
    assert gathers_in_gaps(buckets, share=1.0, pieces=[3, 1]) == early
    assert gathers_in_gaps(buckets, share=0.1, pieces=[1, 1]).after == [[0], []]
    assert gathers_in_gaps(buckets, share=1.0, pieces=[1, 1]).after == [[0], []]
    step = simulate_step(buckets, forward=2.0, backward=6.0, early=early)
    assert [(o.kind, o.bucket, o.start, o.end) for o in step.operations] == [
        ("reduce_scatter", 0, 1.0, 2.0),
        ("all_gather", 0, 2.0, 4.0),
        ("all_gather", 0, 4.0, 6.0),
        ("reduce_scatter", 1, 6.0, 7.0),
        ("all_gather", 1, 7.0, 8.0),
        ("all_gather", 0, 8.0, 10.0),
    ]
    assert step.seconds == 7.0 + 2.0 + 2.0, "the second layer, needed at 8, has its weights at 10"


def test_a_single_gradient_has_no_schedule() -> None:
    bucket = BucketTimes(ready=0.0, needed=0.0, reduce_scatter=0.1, all_gather=0.1)
    assert choose_early_gathers([bucket]) == EarlyGathers.none(1)


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.1])
def test_a_large_bucket_is_gathered_in_pieces(ratio: float) -> None:
    """As of AlexNet: most values belong to three layers that take little time, and are the first to be reduced."""
    sizes, moments = [4, 17, 38, 1, 1, 0.6, 0.3, 0.1], [0.05, 0.1, 0.15, 0.6, 1.0, 1.4, 1.8, 2.0]
    halves = [1.5 * ratio * size / sum(sizes) for size in sizes]
    buckets = [BucketTimes(ready, 1 - ready / 2, half, half) for ready, half in zip(moments, halves, strict=True)]
    in_pieces, as_a_whole = choose_early_gathers(buckets), choose_early_gathers(buckets, divisible=False)
    assert in_pieces.pieces[2] > 1
    assert set(as_a_whole.pieces) == {1}
    seconds = [simulate_step(buckets, 1.0, 2.0, early).seconds for early in (in_pieces, as_a_whole)]
    assert seconds[0] < 0.95 * seconds[1]


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_near_the_best(seed: int) -> None:
    """Of all schedules of four random buckets; never worse than the paper's."""
    draw = random.Random(seed)
    durations = [draw.uniform(0.1, 1.0) for _ in range(4)]
    moments = sorted(draw.uniform(0.0, 3.0) for _ in range(4))
    buckets = [
        BucketTimes(ready, needed, duration, duration)
        for ready, needed, duration in zip(
            moments, sorted((m / 2 for m in moments), reverse=True), durations, strict=True
        )
    ]
    forward, backward = buckets[0].needed, buckets[-1].ready

    def seconds(early: EarlyGathers | None) -> float:
        return simulate_step(buckets, forward, backward, early).seconds

    best = seconds(None)
    for places in itertools.product([None, 0, 1, 2], repeat=4):  # after which reduce-scatter each is gathered
        if all(place is None or place >= i for i, place in enumerate(places)):
            for order in (1, -1):
                early = [[i for i, place in enumerate(places) if place == after][::order] for after in range(4)]
                best = min(best, seconds(whole(early)))
    found = seconds(choose_early_gathers(buckets))
    assert found <= seconds(None)
    assert found <= best * 1.06


@pytest.mark.parametrize("network", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("ratio", [0.67, 0.8, 1.0, 1.25, 1.33])
def test_nothing_is_lost_on_another_network_than_was_measured(ratio: float, network: float) -> None:
    for num_buckets in (3, 5, 8, 13):
        for sizes in (None, [*range(1, num_buckets + 1)], [*range(num_buckets, 0, -1)]):
            measured = chain(num_buckets, ratio, sizes)
            actual = [bucket.on(network) for bucket in measured]
            with_early = simulate_step(actual, 1.0, 2.0, choose_early_gathers(measured)).seconds
            assert with_early <= simulate_step(actual, 1.0, 2.0).seconds


def every_bucket_at_once(buckets: Sequence[BucketTimes], divisible: bool = True) -> EarlyGathers:
    """The most eager schedule: each all-gather follows its reduce-scatter."""
    return whole([[index] for index in range(len(buckets) - 1)] + [[]])


def late_and_in_reverse(buckets: Sequence[BucketTimes], divisible: bool = True) -> EarlyGathers:
    """A schedule in which all-gathers wait for another bucket's reduce-scatter."""
    last = len(buckets) - 2
    return whole([list(range(last, -1, -1)) if index == last else [] for index in range(len(buckets))])


def in_pieces(buckets: Sequence[BucketTimes], divisible: bool = True) -> EarlyGathers:
    """A schedule of pieces: of the first bucket all, of others some, of the last bucket's even shards none."""
    assert divisible
    last = len(buckets) - 1
    after = [[0], [0, 1, 1, 1], [0, 2, 0], *([index, index] for index in range(3, last)), []]
    return EarlyGathers([4, 7, 2, *[3] * (last - 3), 5], after)


Schedule = Callable[[Sequence[BucketTimes], bool], EarlyGathers]


def train(schedule: Schedule | None, settings: dict[str, Any], kind: str) -> tuple[dict[str, Tensor], float]:
    """Trains with DeAR, or with averaged gradients; returns the weights and the number of early all-gathers."""
    model = seeded_mlp()
    if kind == "unused":
        model.add_module("unused", nn.Linear(3, 3))
    if schedule is None:
        run = Run(Averaged, "adamw", model)
    else:
        eager.choose_early_gathers = schedule
        run = Run(DeAR, "adamw", model, update="replicated", fusion="none", **settings)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        # DeAR notices a second pass that comes after reduce-scatters and early all-gathers.
        if kind in ("accumulate", "second pass"):
            with run.sync.no_sync() if kind == "accumulate" else nullcontext():
                loss(model, STEPS + i, dist.get_rank()).backward()
        loss(model, i, dist.get_rank()).backward()
        if kind == "clip value":
            run.sync.clip_value(0.01)
        elif kind == "clip norm":
            run.sync.clip(0.5)
        run.sync.step()
    run.sync.flush()
    early = 0.0 if schedule is None else run.sync.metrics()["early_gathers"]
    return run.end(), early


@pytest.mark.parametrize("schedule", [every_bucket_at_once, late_and_in_reverse, in_pieces])
@pytest.mark.parametrize("kind", ["plain", "unused", "accumulate", "second pass", "clip value", "clip norm"])
def test_any_schedule_trains_with_averaged_gradients(schedule: Schedule, kind: str) -> None:
    """Bit for bit; but for the norm, which is summed in another order."""
    [(expected, _), *_] = on_ranks(train, 2, None, {}, kind)
    for weights, early in on_ranks(train, 2, schedule, {}, kind):
        assert early >= 3
        assert_same(weights, expected, exact=kind != "clip norm")


@pytest.mark.parametrize(
    ("world_size", "topology", "schedule"),
    [
        *((3, "flat", schedule) for schedule in (every_bucket_at_once, in_pieces)),
        (4, "torus2d", every_bucket_at_once),
        *((3, "tree", schedule) for schedule in (every_bucket_at_once, in_pieces)),
    ],
)
def test_ranks_stay_together(world_size: int, topology: str, schedule: Schedule) -> None:
    settings = {"topology": topology}
    paper = {**settings, "overlap": "forward"}
    [(expected, early), *_] = on_ranks(train, world_size, every_bucket_at_once, paper, "plain")
    assert early == 0
    for weights, _ in on_ranks(train, world_size, schedule, settings, "plain"):
        assert_same(weights, expected)


def loss_scaler_skips(overlap: str) -> dict[str, Tensor]:
    """Trains with a loss scaler whose sixth and seventh steps overflow on rank 1."""
    eager.choose_early_gathers = every_bucket_at_once
    run = Run(DeAR, update="replicated", fusion="none", overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        x, y = batch(i, dist.get_rank())
        if i in (5, 6) and dist.get_rank() == 1:
            x = x * float("inf")
        scaler.scale(nn.functional.cross_entropy(run.model(x), y)).backward()
        run.sync.reduce(scaler=scaler)
        run.sync.clip(1.0)
        run.sync.step(lambda: scaler.step(run.optimizer))
        scaler.update()
    assert scaler.get_scale() < 2.0**12, "two steps were skipped"
    return run.end()


def test_a_skipped_step_drops_what_was_gathered() -> None:
    [paper, *_] = on_ranks(loss_scaler_skips, 2, "forward")
    assert all(value.isfinite().all() for value in paper.values())
    for overlap in ("eager", "none"):
        for weights in on_ranks(loss_scaler_skips, 2, overlap):
            assert_same(weights, paper, overlap)


def order_of_operations() -> list[str]:
    """Four layers of one bucket each; rank 1's operations are slow to start."""
    eager.choose_early_gathers = lambda buckets, divisible: whole([[], [0], [], []])
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = DeAR(model, optimizer, update="replicated", fusion="none")
    operations: list[str] = []
    places: dict[int, int] = {}
    transport = sync.transport

    def recording(kind: str, start: Any) -> Any:
        def run(flat: Tensor, **settings: Any) -> Any:
            time.sleep(0.02 * dist.get_rank())
            if places:
                operations.append(f"{kind} {places[flat.data_ptr()]}")
            return start(flat, **settings)

        return run

    transport.reduce_scatter = recording("reduce", transport.reduce_scatter)  # type: ignore[method-assign]
    transport.all_gather = recording("gather", transport.all_gather)  # type: ignore[method-assign]
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
    for operations in on_ranks(order_of_operations, 2):
        assert operations[:8] == [
            "reduce 0",
            "reduce 1",
            "gather 0",
            "reduce 2",
            "reduce 3",
            "gather 3",
            "gather 2",
            "gather 1",
        ]


class Moments:
    """A clock that is set by hand."""

    moment = 0.0

    def now(self) -> float:
        return self.moment

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin


def test_times_are_those_of_computation() -> None:
    """Medians of three steps after the first; waits for weights do not count."""
    times, clock = StepTimes(torch.device("cpu")), Moments()
    times._clock = clock  # type: ignore[assignment]
    assert times.now() is None
    times.begin()
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    for step in range(5):
        for module, wait, computes in ((first, 3.0, 1.0 + step), (second, 5.0, 1.0)):
            began = times.now()
            clock.moment += wait
            times.module_has_waited(module, began)
            clock.moment += computes
        for module, seconds in ((second, 2.0), (first, 4.0 + step)):
            clock.moment += seconds
            times.gradient_is_ready(module.weight)
        assert times.measuring == (step < 4)
        times.end_step()
    assert times.needed == {id(first.weight): 0.0, id(second.weight): 3.0}
    assert times.ready == {id(second.weight): 0.0, id(first.weight): 6.0}


def with_two_optimizers() -> tuple[float, bool, bool]:
    eager.choose_early_gathers = every_bucket_at_once
    model = seeded_mlp()
    optimizers = [OPTIMIZERS["sgd"](model[0]), OPTIMIZERS["sgd"](model[2])]
    sync = DeAR(model, optimizers, fusion="none")
    for i in range(STEPS):
        x, y = batch(i, dist.get_rank())
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            sync.step(optimizer=optimizer)
    sync.flush()
    outcome = sync.metrics()["early_gathers"], sync.planned, all(bucket.sharded for bucket in sync._fused.buckets)
    sync.detach()
    return outcome


def test_several_optimizers_gather_nothing_early() -> None:
    """One may step without the others; each rank then updates its shard, as with the paper's schedule."""
    assert on_ranks(with_two_optimizers, 2) == [(0, True, True)] * 2
