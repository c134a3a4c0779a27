"""BackPipe and FeedPipe without communication: what starts when, and what waits for it."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import nn

from lightning_pipesync.core.parameters import hook_gradient
from lightning_pipesync.methods.gradients.backpipe import BackPipeSchedule
from lightning_pipesync.methods.gradients.execution_order import ExecutionOrder
from lightning_pipesync.methods.gradients.feedpipe import FeedPipeSchedule

BUCKETS = ["ab", "c", "def", "gh"]


def observe(order: ExecutionOrder, module: nn.Module, _: object) -> None:
    order.forward_begins(module)


@pytest.mark.parametrize("seed", range(20))
def test_a_reduce_scatter_starts_as_early_as_the_order_allows(seed: int) -> None:
    """In whatever order gradients become ready: with the last gradient of its bucket and of all before it."""
    arrivals = random.Random(seed).sample("abcdefgh", 8)
    schedule = BackPipeSchedule([len(bucket) for bucket in BUCKETS])
    started: list[int] = []
    for i, parameter in enumerate(arrivals):
        [bucket] = [index for index, members in enumerate(BUCKETS) if parameter in members]
        started += schedule.gradient_is_ready(bucket)
        ready = [set(members) <= set(arrivals[: i + 1]) for members in BUCKETS]
        assert started == list(range((*ready, False).index(False)))
    assert started == [0, 1, 2, 3]
    assert list(schedule.finish()) == []
    assert not schedule.outdated


def test_in_the_expected_order_each_starts_at_once() -> None:
    schedule = BackPipeSchedule([2, 1, 3, 2])
    starts = [list(schedule.gradient_is_ready(bucket)) for bucket in (0, 0, 1, 2, 2, 2, 3, 3)]
    assert starts == [[], [0], [1], [], [], [2], [], [3]]


@pytest.mark.parametrize("missing", ["a", "c", "h", "abc", "abcdefgh"])
def test_missing_gradients_delay_and_never_reorder(missing: str) -> None:
    """A rank without some gradients starts the same reduce-scatters as all others, in the same order."""
    schedule = BackPipeSchedule([len(bucket) for bucket in BUCKETS])
    started: list[int] = []
    for bucket, members in enumerate(BUCKETS):
        for parameter in members:
            if parameter not in missing:
                started += schedule.gradient_is_ready(bucket)
    complete = [not set(members) & set(missing) for members in BUCKETS]
    assert started == list(range((*complete, False).index(False)))
    assert started + list(schedule.finish()) == [0, 1, 2, 3]


def test_frozen_parameters_are_not_awaited() -> None:
    schedule = BackPipeSchedule([1, 0, 1])
    assert list(schedule.gradient_is_ready(0)) == [0, 1]


def test_a_second_backward_pass_is_noticed() -> None:
    """Only where it changes a gradient whose reduce-scatter has started."""
    schedule = BackPipeSchedule([1, 2])
    schedule.gradient_is_ready(1)
    schedule.gradient_is_ready(1)
    assert list(schedule.gradient_is_ready(1)) == []
    assert not schedule.outdated, "nothing has started"
    assert list(schedule.gradient_is_ready(0)) == [0, 1]
    assert list(schedule.gradient_is_ready(1)) == []
    assert schedule.outdated


def test_all_gathers_follow_the_forward_pass() -> None:
    schedule = FeedPipeSchedule(["hg", "fd", "e", "cba"], "abcdefgh")
    assert schedule.order == [3, 1, 2, 0], "by the first parameter of each bucket that is needed"


def test_a_module_waits_for_its_own_buckets_only() -> None:
    schedule = FeedPipeSchedule(["hg", "fd", "e", "cba"], "abcdefgh")
    assert schedule.awaited("ab") == [3], "once for both"
    assert schedule.awaited("cd") == [3, 1]
    assert schedule.awaited("") == []
    assert schedule.awaited("x") == [], "no optimizer has it"


class Shuffled(nn.Module):
    """Runs in another order than it registers; uses a weight outside its module, and another module never."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.embedding, self.unused = nn.Embedding(3, 2), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(nn.functional.linear(x, self.embedding.weight[:2])))


def test_the_order_of_a_model_is_observed() -> None:
    model = Shuffled()
    names = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    order = ExecutionOrder(model)
    for child in order.modules:
        child.register_forward_pre_hook(partial(observe, order))
    for parameter in model.parameters():
        hook_gradient(parameter, order.gradient_is_ready)
    model(torch.ones(1, 2)).sum().backward()
    assert [names[key] for key in order.needed] == ["first", "last"]
    assert [names[key] for key in order.ready] == ["last", "first", "embedding"]
    assert {names[id(parameter)] for parameter in order.used_elsewhere} == {"embedding", "unused"}


def test_both_schedules_of_an_observed_model() -> None:
    """Buckets of one layer each: reduce-scatters from the last layer to the first, all-gathers the other way."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    order = ExecutionOrder(model)
    events: list[str] = []
    buckets = [[id(p) for p in layer.parameters()] for layer in reversed(model)]
    feedpipe = FeedPipeSchedule(buckets, [key for bucket in reversed(buckets) for key in bucket])
    backpipe = BackPipeSchedule([2, 2, 2])
    for i, layer in enumerate(model):
        own = [id(parameter) for parameter in layer.parameters()]
        assert feedpipe.awaited(own) == [2 - i]
        layer.register_forward_pre_hook(partial(observe, order))
        layer.register_full_backward_pre_hook(lambda *_, i=i: events.append(f"backward {i}"))
        for parameter in layer.parameters():
            hook_gradient(
                parameter,
                lambda _, i=i: events.extend(f"reduce_scatter {b}" for b in backpipe.gradient_is_ready(2 - i)),
            )
    model(torch.ones(1, 2).requires_grad_()).sum().backward()
    expected = ["backward 2", "reduce_scatter 0", "backward 1", "reduce_scatter 1", "backward 0", "reduce_scatter 2"]
    assert events == expected
    assert feedpipe.order == [2, 1, 0]
