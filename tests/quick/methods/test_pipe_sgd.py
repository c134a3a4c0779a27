"""Pipe-SGD on real processes against a delayed loop with plain tensors."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.codecs import CODECS
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig, gradient
from tests.references.pipe_sgd import flat, simulate
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, assert_refused, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, batch, loss, seeded_mlp

STEPS = 9
CLIPS = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
}

#: The optimizer, the settings, and what else the loop does.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"k={k}": ("sgd", {"staleness": k}, {}) for k in range(4)},
    **{f"as in the paper, k={k}": ("sgd", {"staleness": k, "delay_compensation": "none"}, {}) for k in (1, 3)},
    "as in the paper, level 2": ("adamw", {"pipeline_level": 2, "delay_compensation": "none"}, {}),
    "by momentum": ("sgd", {"delay_compensation": "momentum"}, {}),
    "by momentum, adamw, k=2": ("adamw", {"staleness": 2, "delay_compensation": "momentum"}, {"clip": "norm"}),
    "adamw": ("adamw", {}, {}),
    "adamw, k=2": ("adamw", {"staleness": 2}, {}),
    **{f"level 2, k={k}": ("sgd", {"staleness": k, "pipeline_level": 2}, {}) for k in range(3)},
    "one segment": ("adamw", {"pipeline_level": 2, "segments": 1}, {}),
    "many segments": ("adamw", {"pipeline_level": 2, "segments": 50}, {}),
    "pieces": ("sgd", {"bucket_mb": 1e-4}, {}),
    "pieces of a large buffer": ("sgd", {}, {"piece": 20}),
    "pieces of a large buffer, level 2": ("sgd", {"pipeline_level": 2}, {"piece": 20}),
    "warm-up": ("adamw", {"staleness": 2, "warmup_steps": 4}, {}),
    "accumulation": ("sgd", {}, {"accumulate": 3}),
    "accumulation, level 2": ("sgd", {"pipeline_level": 2}, {"accumulate": 3}),
    "clipping by norm": ("sgd", {}, {"clip": "norm"}),
    "clipping by value": ("sgd", {"staleness": 2}, {"clip": "value"}),
    "drained": ("sgd", {"staleness": 3, "drain": True}, {}),
    "gradients set to zero": ("sgd", {"warmup_steps": 2, "staleness": 2}, {"set_to_none": False}),
    "schedule": ("sgd", {"staleness": 2, "drain": True}, {"schedule": True}),
    "less by staleness": ("sgd", {"staleness": 3, "delay_compensation": "staleness"}, {}),
    "less by distance": ("sgd", {"delay_compensation": "distance", "distance_constant": 1e-4}, {}),
    **{codec: ("sgd", {"compression": codec}, {}) for codec in CODECS if codec != "none"},
    **{
        f"{codec} without feedback": ("sgd", {"compression": codec, "error_feedback": False}, {})
        for codec in ("bf16", "truncate16", "fp8", "int8", "int4", "topk", "chunked_topk")
    },
}
#: By number of ranks; on three the other cases are trained by night.
TRAINED: dict[int, tuple[str, ...]] = {
    1: ("adamw, k=2",),
    2: ("k=1", "k=2", "as in the paper, k=1", "drained", "schedule", "bf16", "int8", "clipping by value"),
    3: (
        *("k=0", "k=1", "k=2", "by momentum", "adamw", "level 2, k=1", "pieces", "pieces of a large buffer", "warm-up"),
        *(
            "accumulation, level 2",
            "clipping by norm",
            "gradients set to zero",
            "less by staleness",
            "less by distance",
        ),
        *("int8", "fp8", "topk", "chunked_topk", "int4 without feedback"),
    ),
}


def set_rate(optimizer: Optimizer, loop: dict[str, Any], step: int) -> None:
    if "schedule" in loop:
        optimizer.param_groups[0]["lr"] = 0.05 * 0.9**step


def train(case: str, resumed_at: int | None = None) -> tuple[list[Tensor], dict[str, float]]:
    """Returns the weights after each step, and after the pipeline is drained if the settings say so; and metrics."""
    with mock.patch.object(gradient, "SHARD_OF_PIECE", CASES[case][2].get("piece", gradient.SHARD_OF_PIECE)):
        return train_on(*CASES[case], resumed_at)


def train_on(
    optimizer: str, settings: dict[str, Any], loop: dict[str, Any], resumed_at: int | None
) -> tuple[list[Tensor], dict[str, float]]:
    rank, accumulate, weights = dist.get_rank(), loop.get("accumulate", 1), []
    run = Run(PipeSGD, optimizer, seeded_mlp(seed=rank), **settings)  # rank 0's weights count
    for step in range(STEPS):
        if step == resumed_at:
            run = run.resumed(seeded_mlp(seed=7))
        set_rate(run.optimizer, loop, step)
        run.optimizer.zero_grad(set_to_none=loop.get("set_to_none", True))
        for micro in range(accumulate - 1):
            with run.sync.no_sync():
                loss(run.model, step * accumulate + micro, rank).backward()
        loss(run.model, step * accumulate + accumulate - 1, rank).backward()
        if loop.get("clip") == "norm":
            run.sync.clip(0.1)
        elif loop.get("clip") == "value":
            run.sync.clip_value(0.01)
        run.sync.step()
        weights.append(flat(run.model))
    if run.sync.config.drain:
        run.sync.drain()
        weights.append(flat(run.model))
    metrics = run.sync.metrics()
    run.sync.detach()
    return weights, metrics


@cache
def trained(world_size: int) -> Outcomes:
    cases: dict[Any, Any] = {name: partial(train, name) for name in TRAINED[world_size]}
    if world_size == 2:
        cases["resumed"] = partial(train, "schedule", resumed_at=4)
    return launch_cases(cases, world_size)


@cache
def expected(case: str, world_size: int, columns: int = 1) -> list[Tensor]:
    name, settings, loop = CASES[case]
    known = {k: v for k, v in settings.items() if k not in ("pipeline_level", "segments", "bucket_mb")}
    known |= {"accumulate": loop.get("accumulate", 1), "clip": CLIPS.get(loop.get("clip", ""), lambda parameters: None)}
    model = seeded_mlp()
    optimizer, ranks = OPTIMIZERS[name](model), {"world_size": world_size, "columns": columns}
    set_rates = partial(set_rate, optimizer, loop)
    return simulate(model, optimizer, loss, **ranks, num_steps=STEPS, before_step=set_rates, **known)


@pytest.mark.parametrize(
    ("world_size", "case"), [(2, "resumed"), *((number, case) for number, cases in TRAINED.items() for case in cases)]
)
def test_follows_algorithm_1(world_size: int, case: str) -> None:
    """Bit for bit, at every step, on every rank; where a norm is taken, to its rounding."""
    assert_follows(trained(world_size)[case], case.replace("resumed", "schedule"), world_size)


def assert_follows(outcomes: list[tuple[list[Tensor], dict[str, float]]], case: str, *ranks: int) -> None:
    """Asserts that ranks, perhaps on hosts of several ranks, have the reference's weights."""
    settings = CASES[case][1]
    for weights, metrics in outcomes:
        for step, (one, other) in enumerate(zip(weights, expected(case, *ranks), strict=True)):
            if "distance" in case:
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other), f"step {step}: off by {(one - other).abs().max()}"
        assert all(map(torch.equal, weights, outcomes[0][0]))
        k = settings.get("staleness", 1)
        assert metrics["updates"] == STEPS - (0 if settings.get("drain") else k)
        assert metrics["staleness"] == k


def order_of_events(level: int) -> list[str]:
    settings = {"pipeline_level": 2, "segments": 2} if level == 2 else {}
    run = Run(PipeSGD, **settings)
    events: list[str] = []
    submit, step = run.sync._queue.submit, 0

    def recording(*args: Any, **settings: Any) -> Any:
        handle, submitted = submit(*args, **settings), step
        events.append(f"start {submitted}")
        wait = handle.wait
        handle.wait = lambda: (events.append(f"wait {submitted}"), wait())[1]  # type: ignore[func-returns-value]
        return handle

    run.sync._queue.submit = recording
    run.model[0].register_full_backward_hook(lambda *_: events.append(f"first layer {step}"))
    for step in range(4):
        run.optimizer.zero_grad()
        x, _ = batch(step, dist.get_rank())
        run.model(x.requires_grad_()).sum().backward()
        run.sync.step()
        events.append(f"end {step}")
    run.sync.detach()
    return events


def test_a_step_does_not_wait_for_its_own_gradient() -> None:
    """At level 2 its segments start in the backward pass."""
    outcomes = launch_cases({level: partial(order_of_events, level) for level in (1, 2)}, 2)
    for events in outcomes[1]:
        for step in range(3):
            assert events.index(f"start {step}") < events.index(f"end {step}") < events.index(f"start {step + 1}")
            assert events.index(f"start {step + 1}") < events.index(f"wait {step}")
        assert "wait 3" not in events
    for events in outcomes[2]:
        for step in range(4):
            assert events.index(f"start {step}") < events.index(f"first layer {step}")
            assert events.count(f"start {step}") == 2


class WithoutRate(Optimizer):
    """It has no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"size": 1.0})

    def step(self, closure: Any = None) -> None:
        """Leaves everything as it is."""


def misuse() -> tuple[dict[str, tuple[str, str] | None], tuple[str, str] | None]:
    """Returns, by the word that the message must hold, what is raised; and what a second backward pass raises."""
    model = seeded_mlp()
    sgd, without_rate = OPTIMIZERS["sgd"](model), WithoutRate(model.parameters())
    halves = [SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    refused = {
        "bucket_mb=None": raised(lambda: PipeSGDConfig(pipeline_level=2, bucket_mb=4.0)),
        "2 optimizers": raised(lambda: PipeSGD(model, halves, pipeline_level=2)),
        "WithoutRate has none": raised(lambda: PipeSGD(model, without_rate, delay_compensation="distance")),
        "staleness: rank 0 has 1, rank 1 has 2": raised(lambda: PipeSGD(model, sgd, staleness=1 + dist.get_rank())),
    }
    run = Run(PipeSGD, pipeline_level=2)
    refused["is not an optimizer that was passed to PipeSGD"] = raised(lambda: run.sync.step(optimizer=halves[0]))
    run.backward(0)
    second_pass = raised(lambda: run.backward(1))
    run.sync.detach()
    return refused, second_pass


def test_misuse_is_named_on_all_ranks() -> None:
    for refused, second_pass in on_ranks(misuse, 2):
        assert_refused(refused)
        assert_raised(second_pass, "RuntimeError", "no_sync()")
