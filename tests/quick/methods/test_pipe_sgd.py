"""Pipe-SGD on real processes against a delayed loop with plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.codecs import CODECS
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig, layout
from tests.references.pipe_sgd import simulate
from tests.support.harness import assert_raised, assert_refused, call_on_hosts, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, batch, loss, seeded_mlp

STEPS = 12
CLIPS = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


def decaying(step: int) -> float:
    return 0.05 * 0.9**step


#: The optimizer, the settings, and what else the loop does.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"k={k}": ("sgd", {"staleness": k}, {}) for k in range(4)},
    **{f"as in the paper, k={k}": ("sgd", {"staleness": k, "delay_compensation": "none"}, {}) for k in range(1, 4)},
    "as in the paper, level 2": ("adamw", {"pipeline_level": 2, "delay_compensation": "none"}, {}),
    "by momentum": ("sgd", {"delay_compensation": "momentum"}, {}),
    "by momentum, adamw, k=2": ("adamw", {"staleness": 2, "delay_compensation": "momentum"}, {"clip": "norm"}),
    "adamw": ("adamw", {}, {}),
    "adamw, k=2": ("adamw", {"staleness": 2}, {}),
    **{f"level 2, k={k}": ("sgd", {"staleness": k, "pipeline_level": 2}, {}) for k in range(3)},
    "one segment": ("adamw", {"pipeline_level": 2, "segments": 1}, {}),
    "many segments": ("adamw", {"pipeline_level": 2, "segments": 50}, {}),
    "pieces": ("sgd", {"bucket_mb": 1e-4}, {}),
    "warm-up": ("adamw", {"staleness": 2, "warmup_steps": 4}, {}),
    "accumulation": ("sgd", {}, {"accumulate": 3}),
    "accumulation, level 2": ("sgd", {"pipeline_level": 2}, {"accumulate": 3}),
    "clipping by norm": ("sgd", {}, {"clip": "norm"}),
    "clipping by value": ("sgd", {"staleness": 2}, {"clip": "value"}),
    "drained": ("sgd", {"staleness": 3, "drain": True}, {}),
    "gradients set to zero": ("sgd", {"warmup_steps": 2, "staleness": 2}, {"set_to_none": False}),
    "schedule": ("sgd", {"staleness": 2, "drain": True}, {"schedule": True}),
    "less by staleness": ("sgd", {"staleness": 3, "delay_compensation": "staleness"}, {}),
    "less by distance": ("sgd", {"delay_compensation": "distance", "distance_constant": 1e-3}, {}),
    **{codec: ("sgd", {"compression": codec}, {}) for codec in CODECS},
    **{
        f"{codec} without feedback": ("sgd", {"compression": codec, "error_feedback": False}, {})
        for codec in ("bf16", "truncate16", "fp8", "int8", "int4", "topk", "chunked_topk")
    },
}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in list(model.parameters())[::-1]])


def train(optimizer_name: str, settings: dict[str, Any], loop: dict[str, Any]) -> list[Tensor]:
    """Returns the weights after each step, and after the pipeline is drained if the settings say so."""
    rank, accumulate = dist.get_rank(), loop.get("accumulate", 1)
    model = seeded_mlp(seed=rank)  # rank 0's weights count
    optimizer = OPTIMIZERS[optimizer_name](model)
    sync = PipeSGD(model, optimizer, **settings)
    weights = []
    for step in range(STEPS):
        if "schedule" in loop:
            optimizer.param_groups[0]["lr"] = decaying(step)
        optimizer.zero_grad(set_to_none=loop.get("set_to_none", True))
        for micro in range(accumulate - 1):
            with sync.no_sync():
                loss(model, step * accumulate + micro, rank).backward()
        loss(model, step * accumulate + accumulate - 1, rank).backward()
        if loop.get("clip") == "norm":
            sync.clip(0.1)
        elif loop.get("clip") == "value":
            sync.clip_value(0.01)
        sync.step()
        weights.append(flat(model))
    if sync.config.drain:
        sync.drain()
        weights.append(flat(model))
    sync.detach()
    return weights


@cache
def expected(case: str, world_size: int, columns: int = 1) -> list[Tensor]:
    optimizer_name, settings, loop = CASES[case]
    known = {name: settings[name] for name in settings if name in ("compression", "error_feedback", "drain")}
    compensation, constant = settings.get("delay_compensation", "prediction"), settings.get("distance_constant", 1.0)

    def learning_rate(rate: float, late: int, distance: float) -> float:
        if compensation == "staleness":
            return rate / max(1, late)
        return min(rate, constant / distance) if compensation == "distance" and distance else rate

    model = seeded_mlp()
    return simulate(
        model,
        OPTIMIZERS[optimizer_name](model),
        loss,
        world_size=world_size,
        columns=columns,
        num_steps=STEPS,
        staleness=settings.get("staleness", 1),
        warmup_steps=settings.get("warmup_steps", 0),
        accumulate=loop.get("accumulate", 1),
        schedule=decaying if "schedule" in loop else None,
        clip=CLIPS.get(loop.get("clip", ""), lambda model: None),
        learning_rate=learning_rate,
        delay_compensation=compensation if compensation in ("prediction", "momentum") else "none",
        **known,
    )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_follows_algorithm_1(case: str, world_size: int) -> None:
    """Bit for bit, at every step, on every rank; where a norm is taken, to its rounding."""
    reference = expected(case, world_size)
    exact = "distance" not in case
    outcomes = on_ranks(train, world_size, *CASES[case])
    for outcome in outcomes:
        assert len(outcome) == len(reference)
        for step, (weights, other) in enumerate(zip(outcome, reference, strict=True)):
            if exact:
                assert torch.equal(weights, other), f"step {step}: off by {(weights - other).abs().max()}"
            else:
                torch.testing.assert_close(weights, other)
        assert all(map(torch.equal, outcome, outcomes[0]))


@pytest.mark.parametrize("case", ["none", "bf16", "fp8", "int8", "chunked_topk", "int4 without feedback"])
def test_hosts_with_several_ranks_compress_their_sums(case: str) -> None:
    reference = expected(case, 4, 1 if case == "none" else 2)
    for outcome in on_ranks(call_on_hosts, 4, 2, train, *CASES[case]):
        assert all(map(torch.equal, outcome, reference))
    assert case == "none" or not torch.equal(reference[-1], expected(case, 4)[-1])


def test_the_cases_differ() -> None:
    """Or the test above would compare nothing."""
    last = {case: expected(case, 2)[-1] for case in CASES}
    alike = [
        {"k=0", "level 2, k=0"},
        {"k=1", "level 2, k=1", "pieces", "none"},
        {"k=2", "level 2, k=2"},
        {"adamw", "one segment", "many segments"},
        {"accumulation", "accumulation, level 2"},
    ]
    for first, one in last.items():
        for second, other in last.items():
            same = first == second or any({first, second} <= cases for cases in alike)
            assert torch.equal(one, other) == same, (first, second)


def train_in_pieces(case: str) -> list[Tensor]:
    with mock.patch.object(layout, "SHARD_OF_PIECE", 20):
        return train(*CASES[case])


@pytest.mark.parametrize("case", ["k=1", "int8", "level 2, k=1"])
def test_pieces_of_a_large_buffer(case: str) -> None:
    """As if it were exchanged at once, but for what int8 rounds."""
    for weights in on_ranks(train_in_pieces, 2, case):
        for one, other in zip(weights, expected(case, 2), strict=True):
            assert torch.equal(one, other) if case != "int8" else torch.allclose(one, other, atol=0.05)


def test_one_process() -> None:
    [outcome] = on_ranks(train, 1, *CASES["adamw, k=2"])
    assert all(map(torch.equal, outcome, expected("adamw, k=2", 1)))


def order_of_events(level: int) -> list[str]:
    run = Run(PipeSGD, pipeline_level=level, segments=2)
    model, optimizer, sync = run.model, run.optimizer, run.sync
    events: list[str] = []
    submit = sync._queue.submit
    step = 0

    def recording(*args: Any, **settings: Any) -> Any:
        handle, submitted = submit(*args, **settings), step
        events.append(f"start {submitted}")
        wait = handle.wait

        def recorded_wait() -> Tensor:
            events.append(f"wait {submitted}")
            return wait()

        handle.wait = recorded_wait  # type: ignore[method-assign]
        return handle

    sync._queue.submit = recording
    model[0].register_full_backward_hook(lambda *_: events.append(f"first layer {step}"))
    for step in range(4):
        optimizer.zero_grad()
        x, _ = batch(step, dist.get_rank())
        model(x.requires_grad_()).sum().backward()
        sync.step()
        events.append(f"end {step}")
    sync.detach()
    return events


def test_a_step_does_not_wait_for_its_own_gradient() -> None:
    for events in on_ranks(order_of_events, 2, 1):
        for step in range(3):
            assert events.index(f"start {step}") < events.index(f"end {step}") < events.index(f"start {step + 1}")
            assert events.index(f"start {step + 1}") < events.index(f"wait {step}")
        assert "wait 3" not in events


def test_segments_start_in_the_backward_pass() -> None:
    for events in on_ranks(order_of_events, 2, 2):
        for step in range(4):
            assert events.index(f"start {step}") < events.index(f"first layer {step}")
            assert events.count(f"start {step}") == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("staleness", -1),
        ("staleness", 1.5),
        ("segments", 0),
        ("warmup_steps", -1),
        ("pipeline_level", 3),
        ("compression", "zip"),
        ("bucket_mb", 0),
        ("delay_compensation", "some"),
        ("distance_constant", 0),
        ("timeout_s", 0),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting) as caught:
        PipeSGDConfig(**{setting: value})
    assert repr(value) in str(caught.value)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="bucket_mb=None"):
        PipeSGDConfig(pipeline_level=2, bucket_mb=4.0)


class WithoutRate(Optimizer):
    """It has no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"size": 1.0})

    def step(self, closure: Any = None) -> None:
        """Leaves everything as it is."""


def misuse() -> dict[str, tuple[str, str] | None]:
    """Returns, by the word that the message must hold, what is raised."""
    model = seeded_mlp()
    sgd = OPTIMIZERS["sgd"](model)
    halves = [SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    outcomes = {
        "pipeline_level": raised(lambda: PipeSGD(model, sgd, pipeline_level=3)),
        "2 optimizers": raised(lambda: PipeSGD(model, halves, pipeline_level=2)),
        "LBFGS": raised(lambda: PipeSGD(model, torch.optim.LBFGS(model.parameters()))),
        "WithoutRate has none": raised(
            lambda: PipeSGD(model, WithoutRate(model.parameters()), delay_compensation="staleness")
        ),
        "staleness: rank 0 has 1, rank 1 has 2": raised(lambda: PipeSGD(model, sgd, staleness=1 + dist.get_rank())),
    }
    sync = PipeSGD(model, sgd)
    outcomes["is not an optimizer that was passed to PipeSGD"] = raised(lambda: sync.step(optimizer=halves[0]))
    sync.detach()
    return outcomes


def test_misuse_is_named_on_all_ranks() -> None:
    for outcomes in on_ranks(misuse, 2):
        assert_refused(outcomes)


def go_astray() -> list[tuple[str, str] | None]:
    run = Run(PipeSGD, pipeline_level=2)
    model, optimizer, sync = run.model, run.optimizer, run.sync
    loss(model, 0, dist.get_rank()).backward()
    astray = [raised(optimizer.step), raised(lambda: loss(model, 1, dist.get_rank()).backward())]
    sync.detach()
    optimizer.step()
    return astray


def skip_updates(settings: dict[str, Any]) -> list[Tensor]:
    """Looks at the gradient, and leaves out every third update; all ranks alike."""
    run = Run(PipeSGD, **settings)
    weights = []
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(run.model, step, dist.get_rank()).backward()
        norm = run.sync.clip(10.0)
        assert norm > 0 or step < run.sync.config.staleness
        if step % 3 != 2:
            run.sync.step()
        weights.append(flat(run.model))
    run.sync.detach()
    return weights


@pytest.mark.parametrize("settings", [{}, {"pipeline_level": 2}, {"staleness": 2}], ids=str)
def test_updates_may_be_left_out(settings: dict[str, Any]) -> None:
    outcomes = on_ranks(skip_updates, 2, settings)
    assert all(map(torch.equal, outcomes[0], outcomes[1]))
    for step in range(2, STEPS):
        assert torch.equal(outcomes[0][step], outcomes[0][step - 1]) == (step % 3 == 2)


def scale_by_hand() -> tuple[tuple[str, str] | None, ...]:
    """A loss scaler that looks at this rank's own gradient, which overflows on one rank in the fourth step."""
    run = Run(PipeSGD, timeout_s=5)
    model, optimizer, sync = run.model, run.optimizer, run.sync
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def train_on() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss(model, step, dist.get_rank())).backward()
            if step == 3 and dist.get_rank() == 1:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            sync.clip(1.0)
            sync.step(lambda: scaler.step(optimizer))
            scaler.update()

    outcomes = raised(train_on), raised(sync.step)
    sync.detach(timeout_s=0)
    return outcomes


def test_one_ranks_own_decision_to_skip_is_refused() -> None:
    (other, _), (outcome, next_step) = on_ranks(scale_by_hand, 2)
    assert_raised(outcome, "RuntimeError", "sync.reduce(scaler=scaler)")
    assert_raised(next_step, "RuntimeError", "An earlier step ended with an error")
    assert_raised(other, "RuntimeError", "rank 1")


def clip_own(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


def replace_own(run: Run) -> None:
    run.model[0].weight.grad = torch.zeros_like(run.model[0].weight)


def add_to_own(run: Run) -> None:
    with run.sync.no_sync():
        loss(run.model, 5, dist.get_rank()).backward()


def read_own(run: Run) -> None:
    assert all(parameter.grad.norm() > 0 for parameter in run.model.parameters())


def write_after_backward(write: Callable[[Run], None], settings: dict[str, Any]) -> tuple[str, str] | None:
    run = Run(PipeSGD, **settings, timeout_s=10)
    run.steps(range(3))
    run.backward(3)
    write(run)
    error = raised(run.sync.step)
    run.sync.detach()
    return error


@pytest.mark.parametrize("write", [clip_own, replace_own, add_to_own])
def test_what_is_written_to_a_gradient_that_was_sent_is_refused(write: Callable[[Run], None]) -> None:
    for error in on_ranks(write_after_backward, 2, write, {"pipeline_level": 2}):
        assert_raised(error, "RuntimeError", "was written to", "or use pipeline_level=1")
    assert on_ranks(write_after_backward, 2, write, {"pipeline_level": 1}) == [None, None]
    assert on_ranks(write_after_backward, 2, read_own, {"pipeline_level": 2}) == [None, None]


def test_what_would_part_the_ranks_is_refused() -> None:
    for step, backward in on_ranks(go_astray, 2):
        assert_raised(step, "RuntimeError", "SGD.step() was called directly")
        assert_raised(backward, "RuntimeError", "no_sync()")


def drain_with_a_scaler(completes: bool) -> dict[str, Tensor]:
    """A framework's hooks before an update call ``reduce`` with its scaler, also for gradients that are drained."""
    run = Run(PipeSGD, staleness=2, delay_compensation="none")
    scaler = GradScaler("cpu", init_scale=1024.0)
    for number in range(5):
        run.optimizer.zero_grad()
        scaler.scale(loss(run.model, number, dist.get_rank())).backward()
        run.sync.reduce(scaler=scaler)
        run.sync.step(lambda: scaler.step(run.optimizer))
        scaler.update()
    run.sync.drain(lambda optimizer: run.sync.reduce(optimizer, scaler) if completes else None)
    return run.end()


def test_drained_gradients_have_no_loss_scale() -> None:
    for without, completed in zip(*(on_ranks(drain_with_a_scaler, 2, one) for one in (False, True)), strict=True):
        assert_same(completed, without)
