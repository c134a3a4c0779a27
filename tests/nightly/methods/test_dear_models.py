"""DeAR with models, optimizers and loops of all kinds: bit for bit those of averaged gradients, on any schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.dear import schedule as dear_schedule
from tests.quick.methods.test_dear import (
    Schedule,
    every_bucket_at_once,
    in_pieces,
    late_and_in_reverse,
    train_eagerly,
)
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, assert_refused, raised
from tests.support.method_runs import SMALL, Backwards
from tests.support.models import Averaged, Run, assert_same, batch, loss, state

STEPS = 10


class Twice(nn.Module):
    """One layer runs twice, and another only on some ranks and steps; one never does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))
        self.step += 1
        if self.step % 3 == 0 and dist.get_rank() == 1:
            x = x + self.sometimes(x)
        return self.head(torch.tanh(x))


class Reentrant(nn.Module):
    """Recomputes a part in the backward pass, in the older way; the fuzzer has the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()  # or the checkpoint has no gradients
        return self.head(checkpoint(self.body, x, use_reentrant=True))


class Compiled(nn.Module):
    """Two layers that are compiled, in either way."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()  # it compiles a function for some models only
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.first.compile(backend="aot_eager")
        self.compiled = torch.compile(self.second, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.compiled(torch.tanh(self.first(x)))))


def normed() -> nn.Module:
    """Its hooks compute a weight from other parameters before each forward pass."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


def gan() -> nn.Module:
    discriminator = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": discriminator})


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


# --- optimizers -------------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def for_each_part(model: nn.Module, momentum: float = 0.9) -> list[Optimizer]:
    parts = [part for part in model.children() if list(part.parameters())]
    return [SGD(part.parameters(), lr=0.1, momentum=momentum) for part in parts]


def sgd_for_each_part(model: nn.Module) -> list[Optimizer]:
    return for_each_part(model, momentum=0)


# --- loops ------------------------------------------------------------------------------------------------------------


def backward(model: nn.Module, step: int) -> None:
    loss(model, step, dist.get_rank()).backward()


def plainly(model: nn.Module, sync: Any, before: str = "") -> None:
    """Trains; ``before``, a gradient was averaged and not applied, or other weights were trained, or nothing was."""

    def steps(numbers: range) -> None:
        for number in numbers:
            model.zero_grad()
            backward(model, number)
            for optimizer in sync.optimizers:
                sync.step(optimizer=optimizer)

    initial = state(model)
    if before == "skipped":
        backward(model, 99)
        for optimizer in sync.optimizers:
            sync.clip_value(0.1, optimizer)
    if before == "loaded":
        steps(range(20, 26))
        sync.synchronize()
        model.load_state_dict(initial)
    steps(range(STEPS))


def in_two_passes(model: nn.Module, sync: Any, synchronized: bool) -> None:
    """DeAR notices a second pass that comes after reduce-scatters and early all-gathers."""
    for step in range(STEPS):
        model.zero_grad()
        with nullcontext() if synchronized else sync.no_sync():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
        sync.step()


def clipped(model: nn.Module, sync: Any) -> None:
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        assert sync.clip(0.1) > 0.1
        sync.step()


def in_turns(model: nn.Module, sync: Any, apart: bool = False) -> None:
    """As in a GAN: the generator's loss also gives the discriminator gradients, which are thrown away, or not made."""
    for step in range(STEPS):
        x, _ = batch(step, dist.get_rank())
        parts = [model.get_submodule(name) for name in ("generator", "discriminator")]
        for optimizer, trained, sign in zip(sync.optimizers, parts, (1, -1), strict=True):
            model.zero_grad()
            faked = parts[0](x) if apart or sign > 0 else parts[0](x).detach()
            (sign * parts[1](faked)).mean().backward(inputs=list(trained.parameters()) if apart else None)
            sync.step(optimizer=optimizer)


def skipping(model: nn.Module, sync: Any) -> None:
    """What a loss scaler sees is the sum that is to be divided, also in the first step and with an unused layer."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(STEPS):
        model.zero_grad()
        factor = torch.inf if step in (5, 6) and dist.get_rank() == 1 else 1.0
        scaler.scale(loss(model, step, dist.get_rank()) * factor).backward()
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(sync.optimizers[0]))
        scaler.update()
    assert scaler.get_scale() < 2.0**12, "two steps were skipped"


# --- what is compared -------------------------------------------------------------------------------------------------

#: The model, its optimizers and the loop.
Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], Callable[[nn.Module, Any], None]]

CASES: dict[str, Case] = {
    "plain": (mlp, adamw, plainly),
    "twice": (Twice, adamw, plainly),
    "backwards": (Backwards, adamw, plainly),
    "reentrant": (Reentrant, adamw, plainly),
    "compiled": (Compiled, adamw, plainly),
    "normed": (normed, adamw, plainly),
    "accumulation": (Backwards, adamw, partial(in_two_passes, synchronized=False)),
    "two passes": (Backwards, adamw, partial(in_two_passes, synchronized=True)),
    "two passes, ranks that use other layers": (Twice, adamw, partial(in_two_passes, synchronized=True)),
    "clipping": (Backwards, adamw, clipped),
    "two optimizers in turns": (gan, for_each_part, in_turns),
    "skipped steps": (Twice, sgd, skipping),
}
EAGER = ("plain", "twice", "accumulation", "two passes", "skipped steps", "clipping")
SCHEDULES = (every_bucket_at_once, late_and_in_reverse, in_pieces)


def train(
    method: Callable[..., Any], case: str, settings: dict[str, Any], schedule: Schedule | None = None
) -> tuple[dict[str, Tensor], float]:
    """Returns the weights, and the number of early all-gathers of a step."""
    build, optimizer_of, loop = CASES[case] if case in CASES else LIKE[case][0]
    torch.manual_seed(0)
    model = build()
    sync = method(model, optimizer_of(model), **settings)
    try:
        with patch.object(dear_schedule, "choose_early_gathers", schedule) if schedule else nullcontext():
            loop(model, sync)
            sync.flush()
    except Exception:
        sync.detach(timeout_s=1.0)
        raise
    early = 0.0 if method is Averaged else sync.metrics()["early_gathers"]
    sync.detach()
    return state(model), early


def assert_averaged(cases: list[str], variants: dict[str, dict[str, Any]], least_early: float) -> None:
    """Asserts that DeAR trains each case in each variant as averaged gradients do, and that ranks stay together."""
    rows: dict[Any, Any] = {case: partial(train, Averaged, case, {}) for case in cases}
    for name, arguments in variants.items():
        rows |= {(case, name): partial(train, DeAR, case, **arguments) for case in cases}
    outcomes = launch_cases(rows, 2)
    for case in cases:
        expected = outcomes[case][0][0]
        assert all(value.isfinite().all() for value in expected.values())
        for name in variants:
            for weights, early in outcomes[case, name]:
                assert early >= least_early, (case, name)
                assert_same(weights, expected, (case, name), exact=case != "clipping")
                assert_same(weights, outcomes[case, name][0][0], (case, name))


def test_is_training_with_averaged_gradients() -> None:
    """But for rounding where it clips by a norm, which is summed in another order."""
    variants = {update: {"settings": {**SMALL, "update": update}} for update in ("sharded", "replicated")}
    assert_averaged(list(CASES), variants, least_early=0)


def test_any_schedule_is_training_with_averaged_gradients() -> None:
    """Also of steps that are skipped or begun anew, which drop what was gathered early."""
    replicated = {"update": "replicated", "fusion": "none"}
    variants = {one.__name__: {"settings": replicated, "schedule": one} for one in SCHEDULES}
    assert_averaged(list(EAGER), variants, least_early=3)


#: By number of ranks and topology: the schedules that are compared with that of the paper.
ON_MORE: dict[tuple[int, str], tuple[Schedule, ...]] = {
    (3, "flat"): (every_bucket_at_once, in_pieces),
    (3, "tree"): (every_bucket_at_once, in_pieces),
    (4, "torus2d"): (every_bucket_at_once,),
}


@pytest.mark.parametrize(("world_size", "topology"), ON_MORE)
def test_any_schedule_is_that_of_the_paper(world_size: int, topology: str) -> None:
    schedules = ON_MORE[world_size, topology]
    cases: dict[Any, Any] = {one: partial(train_eagerly, one, topology=topology) for one in schedules}
    cases["paper"] = partial(train_eagerly, every_bucket_at_once, topology=topology, overlap="forward")
    outcomes = launch_cases(cases, world_size)
    expected, early = outcomes["paper"][0]
    assert early == 0
    for schedule in schedules:
        for weights, early in outcomes[schedule]:
            assert early > 0
            assert_same(weights, expected, schedule)


# --- what is given up, or refused -------------------------------------------------------------------------------------

#: Further cases, whose weights are those of another one, with what a codec or factors leave to the next step.
LIKE: dict[str, tuple[Case, str, list[dict[str, Any]]]] = {
    "in turns apart": (
        (gan, for_each_part, partial(in_turns, apart=True)),
        "two optimizers in turns",
        [{"compression": "topk"}, {"compression": "int2"}, {"low_rank": 1}],
    ),
    **{
        f"{before} {optimizers_of.__name__}": (
            (mlp, optimizers_of, partial(plainly, before=before)),
            f" {optimizers_of.__name__}",
            [{"compression": "topk"}, {"compression": "topk", "update": "replicated"}, {"compression": "int8"}],
        )
        for optimizers_of in (sgd, sgd_for_each_part)
        for before in ("", "skipped", "loaded")
    },
}


def test_nothing_remains_of_what_is_given_up() -> None:
    """Of gradients that are thrown away, or replaced, or of other weights: neither in residuals nor in factors."""
    rows = [(case, i) for case, (_, _, of_case) in LIKE.items() for i in range(len(of_case))]
    rows += [("two optimizers in turns", i) for i in range(3)]
    settings = {**{case: of_case for case, (_, _, of_case) in LIKE.items()}}
    settings["two optimizers in turns"] = settings["in turns apart"]
    trained = {(case, i): partial(train, DeAR, case, {**SMALL, **settings[case][i]}) for case, i in rows}
    outcomes = launch_cases(trained, 2)
    for case, (_, like, of_case) in LIKE.items():
        for i in range(len(of_case)):
            for weights, _ in outcomes[case, i]:
                assert_same(weights, outcomes[like, i][0][0], (case, of_case[i]))


#: Settings, and what is said of a second pass whose gradient would be added to an error that was made.
TWICE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"compression": "topk"}, ("compression='topk' with error_feedback=True has encoded this",)),
    ({"compression": "topk", "error_feedback": False}, ()),
    ({"low_rank": 2, "fusion": "buffer"}, ("low_rank=2", "no_sync()")),
]


def pass_twice(settings: dict[str, Any]) -> tuple[str, str] | None:
    return raised(partial(train, DeAR, "two passes", {**SMALL, **settings}))


def flush_with_own_rate(update: str) -> tuple[str, str] | None:
    run = Run(DeAR, sgd, **SMALL, update=update)
    for number in range(3):
        run.backward(number)
        run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number * dist.get_rank())  # as by a rank's own metric
        run.sync.step()
    outcome = raised(run.sync.flush)
    run.sync.detach(timeout_s=1.0)
    return outcome


def test_what_would_be_wrong_is_refused() -> None:
    """A second pass that would be added to an error, and a learning rate of a rank's own."""
    cases: dict[Any, Any] = {i: partial(pass_twice, settings) for i, (settings, _) in enumerate(TWICE)}
    updates = ("sharded", "replicated")
    outcomes = launch_cases({**cases, **{one: partial(flush_with_own_rate, one) for one in updates}}, 2)
    for i, (settings, words) in enumerate(TWICE):
        for outcome in outcomes[i]:
            assert (outcome is None) == (not words), settings
            if words:
                assert_raised(outcome, "RuntimeError", *words)
    for update in updates:
        for outcome in outcomes[update]:
            assert_refused({"lr of group 0 of SGD: rank 0 has 0.1, rank 1 has": outcome, "sync_dist=True": outcome})
