"""DeAR on models and in loops that are not plain, against gradients that are averaged one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from lightning_pipesync.methods.dear import DeAR
from tests.support.harness import assert_raised, assert_refused, on_ranks, raised
from tests.support.models import Averaged, assert_same, batch, loss, state

STEPS = 8
SMALL = {"bucket_mb": 1e-4}  # some 26 values: many buckets


class Tied(nn.Module):
    """Its first weight is used again at the end, by a module that shares it and by a plain function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.last(self.middle(torch.tanh(self.first(x))))
        return self.head(torch.tanh(nn.functional.linear(hidden, self.first.weight)))


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


class Backwards(nn.Module):
    """Registered in another order than executed, with a parameter of the root, and one that is used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.head, self.second, self.first = nn.Linear(6, 3), nn.Linear(6, 6), nn.Linear(6, 6)
        self.only_weight = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x * self.scale)))
        x = nn.functional.linear(torch.tanh(x), self.only_weight.weight, self.only_weight.bias)
        return self.head(torch.tanh(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head, self.reentrant = nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()  # or a reentrant checkpoint has no gradients
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


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


class Normed(nn.Module):
    """Its hooks compute the weight from other parameters before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.weight_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def gan() -> nn.Module:
    return nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": nn.Linear(6, 1)})


def deeper_gan() -> nn.Module:
    discriminator = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": discriminator})


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


# --- optimizers -------------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def in_groups(model: nn.Module) -> Optimizer:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return SGD([{"params": weights, "weight_decay": 0.1, "momentum": 0.9}, {"params": biases, "lr": 0.5}], lr=0.1)


def for_each_part(model: nn.Module) -> list[Optimizer]:
    parts = [part for part in model.children() if list(part.parameters())]
    return [SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]


# --- loops ------------------------------------------------------------------------------------------------------------


def backward(model: nn.Module, step: int) -> None:
    loss(model, step, dist.get_rank()).backward()


def plainly(model: nn.Module, sync: Any) -> None:
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        sync.step()


def accumulate(model: nn.Module, sync: Any) -> None:
    for step in range(STEPS):
        model.zero_grad()
        with sync.no_sync():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
        sync.step()


def two_passes(model: nn.Module, sync: Any) -> None:
    for step in range(STEPS):
        model.zero_grad()
        backward(model, 2 * step)
        backward(model, 2 * step + 1)
        sync.step()


def clipped(model: nn.Module, sync: Any) -> None:
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        assert sync.clip(0.1) > 0.1
        sync.step()


def scheduled(model: nn.Module, sync: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of")  # before the optimizer's step
        scheduler = StepLR(sync.optimizers[0], step_size=2, gamma=0.5)
        for step in range(STEPS):
            model.zero_grad()
            backward(model, step)
            sync.step()
            scheduler.step()


def thawing(model: nn.Module, sync: Any) -> None:
    for step in range(STEPS):
        model.get_submodule("first").requires_grad_(step >= 4)
        model.zero_grad()
        backward(model, step)
        sync.step()


def in_turns(model: nn.Module, sync: Any) -> None:
    """As in a GAN: the generator's loss also gives the discriminator gradients, which are thrown away."""
    for step in range(STEPS):
        x, _ = batch(step, dist.get_rank())
        for optimizer, sign in zip(sync.optimizers, (1, -1), strict=True):
            model.zero_grad()
            faked = model.get_submodule("generator")(x)
            if sign < 0:
                faked = faked.detach()
            (sign * model.get_submodule("discriminator")(faked)).mean().backward()
            sync.step(optimizer=optimizer)


def in_turns_apart(model: nn.Module, sync: Any) -> None:
    """As :func:`in_turns`, without the gradients that are thrown away."""
    for step in range(STEPS):
        x, _ = batch(step, dist.get_rank())
        parts = [model.get_submodule(name) for name in ("generator", "discriminator")]
        for optimizer, trained, sign in zip(sync.optimizers, parts, (1, -1), strict=True):
            model.zero_grad()
            (sign * parts[1](parts[0](x))).mean().backward(inputs=list(trained.parameters()))
            sync.step(optimizer=optimizer)


def scaled(model: nn.Module, sync: Any) -> None:
    """What a loss scaler sees is the sum that is to be divided, also in the first step and with an unused layer."""
    scaler = GradScaler("cpu", init_scale=1024)
    for step in range(STEPS):
        model.zero_grad()
        scaler.scale(loss(model, step, dist.get_rank())).backward()
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(sync.optimizers[0]))
        scaler.update()


def one_pass_for_two(model: nn.Module, sync: Any) -> None:
    """One optimizer's weights are on their way while the other's gradient is clipped."""
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        for optimizer in sync.optimizers:
            sync.clip(0.05, optimizer)
            sync.step(optimizer=optimizer)


# --- what is compared -------------------------------------------------------------------------------------------------

#: The model, its optimizers and the loop.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], Callable[[nn.Module, Any], None]]] = {
    "tied": (Tied, adamw, plainly),
    "twice": (Twice, adamw, plainly),
    "backwards": (Backwards, adamw, plainly),
    "checkpointed": (lambda: Checkpointed(False), adamw, plainly),
    "reentrant": (lambda: Checkpointed(True), adamw, plainly),
    "compiled": (Compiled, adamw, plainly),
    "normed": (Normed, adamw, plainly),
    "accumulation": (Backwards, adamw, accumulate),
    "two passes": (Backwards, adamw, two_passes),
    "two passes, ranks that use other layers": (Twice, adamw, two_passes),
    "clipping": (Backwards, adamw, clipped),
    "groups and a schedule": (Backwards, in_groups, scheduled),
    "thawing": (Backwards, adamw, thawing),
    "two optimizers in turns": (gan, for_each_part, in_turns),
    "unscaling": (Twice, lambda model: SGD(model.parameters(), lr=0.1), scaled),
    "one pass for two optimizers": (mlp, for_each_part, one_pass_for_two),
}


#: Whose gradients are thrown away in between.
APART = {"in turns": in_turns, "apart": in_turns_apart}


def train(method: Callable[..., Any], case: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    build, optimizer_of, loop = CASES[case]
    torch.manual_seed(0)
    model = build()
    sync = method(model, optimizer_of(model), **settings)
    loop(model, sync)
    sync.flush()
    sync.detach()
    return state(model)


@pytest.mark.parametrize("case", CASES)
def test_is_training_with_averaged_gradients(case: str) -> None:
    """Bit for bit, unless it clips by a norm, which is summed in another order."""
    clips = "clipping" in case or "one pass" in case
    world_size = 3 if clips else 2
    [expected, *_] = on_ranks(train, world_size, Averaged, case, {})
    for update in ("sharded", "replicated"):
        outcomes = on_ranks(train, world_size, DeAR, case, {**SMALL, "update": update})
        for outcome in outcomes:
            assert_same(outcome, expected, update, exact=not clips)
            assert_same(outcome, outcomes[0], update)


def train_gan(loop: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = deeper_gan()
    sync = DeAR(model, for_each_part(model), **SMALL, **settings)
    APART[loop](model, sync)
    sync.flush()
    sync.detach()
    return state(model)


@pytest.mark.parametrize("settings", [{"compression": "topk"}, {"compression": "int2"}, {"low_rank": 1}, {}], ids=str)
def test_nothing_remains_of_gradients_that_are_thrown_away(settings: dict[str, Any]) -> None:
    """Neither in residuals nor in factors."""
    thrown_away, apart = (on_ranks(train_gan, 2, loop, settings) for loop in APART)
    for outcome in thrown_away:
        assert_same(outcome, apart[0])


RESIDUALS = [{"compression": "topk"}, {"compression": "topk", "update": "replicated"}, {"compression": "int8"}]


def train_on(what: str, optimizers_of: Callable[[nn.Module], Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Trains; before, a gradient was averaged and not applied, or was added to, or other weights were trained."""
    torch.manual_seed(0)
    model = mlp()
    optimizers = optimizers_of(model)
    sync = DeAR(model, optimizers, **SMALL, **settings)
    initial = state(model)

    def clip() -> None:
        for optimizer in sync.optimizers:
            sync.clip_value(0.1, optimizer)

    def step(number: int) -> None:
        model.zero_grad()
        backward(model, number)
        for optimizer in sync.optimizers:
            sync.step(optimizer=optimizer)

    if what == "skipped":
        backward(model, 99)
        clip()
    if what == "loaded":
        for number in range(20, 26):
            step(number)
        sync.synchronize()
        model.load_state_dict(initial)
    for number in range(STEPS):
        step(number)
    sync.flush()
    sync.detach()
    return state(model)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def sgd_for_each_part(model: nn.Module) -> list[Optimizer]:
    return [SGD(part.parameters(), lr=0.1) for part in model.children() if list(part.parameters())]


@pytest.mark.parametrize("settings", RESIDUALS, ids=str)
@pytest.mark.parametrize("optimizers_of", [sgd, sgd_for_each_part])
@pytest.mark.parametrize("what", ["skipped", "loaded"])
def test_nothing_remains_of_what_is_given_up(what: str, optimizers_of: Any, settings: dict[str, Any]) -> None:
    given_up, anew = (on_ranks(train_on, 2, one, optimizers_of, settings) for one in (what, ""))
    for outcome in given_up:
        assert_same(outcome, anew[0])


def pass_twice(settings: dict[str, Any]) -> tuple[str, str] | None:
    model = mlp()
    sync = DeAR(model, sgd(model), **SMALL, **settings)

    def step(number: int) -> None:
        backward(model, number)
        backward(model, number)
        sync.step()

    outcome = raised(lambda: [step(number) for number in range(3)])
    sync.detach(timeout_s=1.0)
    return outcome


@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_second_pass_is_refused_where_it_would_be_added_to_an_error(error_feedback: bool) -> None:
    for outcome in on_ranks(pass_twice, 2, {"compression": "topk", "error_feedback": error_feedback}):
        if error_feedback:
            assert_raised(outcome, "RuntimeError", "compression='topk' with error_feedback=True has encoded this")
        else:
            assert outcome is None


def flush_with_own_rate(update: str) -> tuple[str, str] | None:
    model = mlp()
    optimizer = sgd(model)
    sync = DeAR(model, optimizer, **SMALL, update=update)
    for number in range(3):
        model.zero_grad()
        backward(model, number)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number * dist.get_rank())  # as by a metric of each rank's own
        sync.step()
    outcome = raised(sync.flush)
    sync.detach(timeout_s=1.0)
    return outcome


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_a_learning_rate_of_a_ranks_own_is_named(update: str) -> None:
    for outcome in on_ranks(flush_with_own_rate, 2, update):
        assert_refused({"lr of group 0 of SGD: rank 0 has 0.1, rank 1 has": outcome, "sync_dist=True": outcome})
