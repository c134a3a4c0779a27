"""DeAR on real processes is DistributedDataParallel, whatever its buckets, updates and schedule; what overlaps what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.dear import schedule as dear_schedule
from lightning_pipesync.methods.dear.schedule import BucketTimes, EarlyGathers
from tests.support.case_table import launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, Averaged, Run, assert_same, batch, seeded_mlp, train_ddp

STEPS = 12
UPDATES = ({"update": "sharded"}, {"update": "replicated"})


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    run = Run(DeAR, optimizer_name, seeded_mlp(seed=dist.get_rank()), **settings)  # rank 0's weights count
    run.steps(range(STEPS))
    run.sync.flush()
    assert run.sync.flushed
    return run.end()


#: By number of ranks: optimizers and settings; DDP divides before the sum, DeAR after it, which is exact for 1 and 2.
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("sgd", update) for update in UPDATES],
    2: [
        *product(OPTIMIZERS, UPDATES),
        *(
            ("adamw", {**update, **changed})
            for update in UPDATES
            for changed in (
                {"bucket_mb": 1e-4},
                {"fusion": "none", "overlap": "forward"},
                {"fusion": "layers", "num_layers": 1, "overlap": "none"},
            )
        ),
    ],
    3: [("sgd", {**update, "fusion": "none"}) for update in UPDATES],
    4: [("sgd", {**update, "fusion": "none"}) for update in UPDATES],
}


@pytest.mark.parametrize("world_size", CASES)
def test_is_ddp(world_size: int) -> None:
    cases: dict[Any, Any] = {name: partial(train_ddp, name, STEPS) for name in OPTIMIZERS}
    cases |= {f"{name}, {settings}": partial(train, name, settings) for name, settings in CASES[world_size]}
    outcomes = launch_cases(cases, world_size)
    for case in list(cases)[len(OPTIMIZERS) :]:
        expected = outcomes[case.partition(",")[0]][0]
        for outcome in outcomes[case]:
            assert_same(outcome, expected, case, exact=world_size in (1, 2))
            assert_same(outcome, outcomes[case][0], case)


def train_row_by_row(method: Callable[..., Any]) -> dict[str, Tensor]:
    """Trains on one sample at a time."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, 27), nn.Tanh(), nn.Linear(27, 9), nn.Tanh(), nn.Linear(9, 3))
    run = Run(method, "sgd", wide)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        x, y = batch(i, dist.get_rank(), size=1)
        nn.functional.cross_entropy(wide(x), y).backward()
        run.sync.step()
    return run.end()


def test_is_ddp_where_memory_decides_how_products_round() -> None:
    """Products with a single row round by the address of the weights on some processors, which are views of buffers."""
    methods = {"averaged": Averaged, "dear": partial(DeAR, fusion="buffer")}
    outcomes = launch_cases({name: partial(train_row_by_row, method) for name, method in methods.items()}, 2)
    for outcome in outcomes["dear"]:
        assert_same(outcome, outcomes["averaged"][0])


# --- all-gathers under the backward pass ------------------------------------------------------------------------------

Schedule = Callable[[Sequence[BucketTimes], bool], EarlyGathers]


def whole(after: Sequence[Sequence[int]]) -> EarlyGathers:
    """All-gathers of whole buckets."""
    return EarlyGathers([1] * len(after), after)


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


def train_eagerly(schedule: Schedule, **settings: Any) -> tuple[dict[str, Tensor], float]:
    """Returns the weights, and the number of early all-gathers of a step."""
    with patch.object(dear_schedule, "choose_early_gathers", schedule):
        run = Run(DeAR, "adamw", update="replicated", fusion="none", **settings)
        run.steps(range(STEPS))
        run.sync.flush()
        early = run.sync.metrics()["early_gathers"]
        return run.end(), early


def test_any_schedule_of_early_gathers_is_ddp() -> None:
    rows = {one.__name__: partial(train_eagerly, one) for one in (every_bucket_at_once, late_and_in_reverse, in_pieces)}
    outcomes = launch_cases({"ddp": partial(train_ddp, "adamw", STEPS), **rows}, 2)
    for row in rows:
        for weights, early in outcomes[row]:
            assert early >= 3, row
            assert_same(weights, outcomes["ddp"][0], row)


# --- what overlaps what -----------------------------------------------------------------------------------------------


class Reordered(nn.Module):
    """Three layers, which run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 64) for _ in range(3)]
        self.registered, self.executed = nn.ModuleList([layers[1], layers[2], layers[0]]), layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.executed:
            x = layer(x)
        return x


def backward_begins(i: int, events: list[str], *_: Any) -> None:
    if i == 0:
        wait_for(lambda: "reduce_scatter 2" in events)
    events.append(f"backward {i}")


def order_of_events() -> list[str]:
    """Three layers of one bucket each, in three steps."""
    model = Reordered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = DeAR(model, optimizer, fusion="layers", num_layers=1)
    events: list[str] = []
    names = {}

    def recording(kind: str, start: Any) -> Any:
        def run(flat: Tensor, **settings: Any) -> Any:
            events.append(f"{kind} {names.get(flat.untyped_storage().data_ptr())}")
            return start(flat, **settings)

        return run

    for kind in ("reduce_scatter", "all_gather"):
        setattr(sync.transport, kind, recording(kind, getattr(sync.transport, kind)))
    for step in range(3):
        if step == 2:
            sync.synchronize()
            events.clear()
            for i, layer in enumerate(model.executed):
                bucket = sync._fused.buckets[sync._backpipe.index_of[id(layer.weight)]]
                assert {id(member.tensor) for member in bucket.members} == {id(p) for p in layer.parameters()}
                names[bucket.gradients.flat.untyped_storage().data_ptr()] = i
                names[bucket.values.flat.untyped_storage().data_ptr()] = i
                layer.register_full_backward_pre_hook(partial(backward_begins, i, events))
        optimizer.zero_grad()
        model(torch.ones(2, 64).requires_grad_()).sum().backward()
        events.append("step")
        sync.step()
    sync.flush()
    sync.detach()
    return events


def test_both_pipes() -> None:
    """BackPipe reduces a layer under the backward pass of the one before it; FeedPipe gathers the first layer first."""
    for events in on_ranks(order_of_events, 2):
        assert events.index("reduce_scatter 2") < events.index("backward 0")
        assert [event for event in events if event.startswith("reduce")] == [f"reduce_scatter {i}" for i in (2, 1, 0)]
        gathers = [event for event in events if event.startswith("all_gather")]
        assert gathers == [f"all_gather {i}" for i in (0, 1, 2)]
        assert events.index("reduce_scatter 0") < events.index("all_gather 0")
        assert events.index("step") < events.index("all_gather 0")


# --- what is refused --------------------------------------------------------------------------------------------------


def misuse() -> dict[str, tuple[str, str] | None]:
    """Returns, by the word that the message must hold, what is raised."""
    model = seeded_mlp()
    sgd = OPTIMIZERS["sgd"](model)

    class Normalized(torch.optim.SGD):
        """Not element-wise, for all we know."""

    outcomes = {
        "LBFGS": raised(lambda: DeAR(model, torch.optim.LBFGS(model.parameters()))),
        "'replicated'": raised(lambda: DeAR(model, Normalized(model.parameters()), update="sharded")),
        "bucket_mb: rank 0 has 1.0, rank 1 has 2.0": raised(lambda: DeAR(model, sgd, bucket_mb=1.0 + dist.get_rank())),
    }
    sync = DeAR(model, Normalized(model.parameters()))
    outcomes["SGD is not"] = raised(lambda: sync.step(optimizer=sgd))
    sync.detach()
    DeAR(model, Normalized(model.parameters()), update="sharded", elementwise=(Normalized,)).detach()
    return outcomes


def test_misuse_is_named_on_all_ranks() -> None:
    for outcomes in on_ranks(misuse, 2):
        assert_refused(outcomes)
