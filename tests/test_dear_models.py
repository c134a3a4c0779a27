"""DeAR against DDP on models and loops that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from lightning_pipesync.methods.dear import DeAR
from tests.harness import launch
from tests.models import average_gradients, batch, state
from tests.test_dear import assert_same_state

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
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.first.compile(backend="aot_eager")
        self.compiled = torch.compile(self.second, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.compiled(torch.tanh(self.first(x)))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "twice": Twice,
    "backwards": Backwards,
    "checkpointed": lambda: Checkpointed(False),
    "compiled": Compiled,
    "reentrant": lambda: Checkpointed(True),
}


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def one_step(model: nn.Module, optimizer: Optimizer, sync: DeAR | None, step: int) -> None:
    """A step of synchronous SGD: by DeAR, or, without it, with gradients that are averaged one by one."""
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if sync is None:
        average_gradients(model)
        optimizer.step()
    else:
        sync.step(optimizer=optimizer)


def both(
    build: Callable[[], nn.Module],
    train: Callable[[nn.Module, nn.Module, Optimizer, DeAR | None], None],
    optimizer_of: Callable[[nn.Module], Optimizer] = lambda model: AdamW(model.parameters(), lr=0.01),
    **settings: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains with DDP and with DeAR and returns both states; ``train`` gets what is called, model and optimizer."""
    torch.manual_seed(0)
    model = build()
    optimizer = optimizer_of(model)
    train(DistributedDataParallel(model, find_unused_parameters=True), model, optimizer, None)
    expected = state(model)
    torch.manual_seed(0)
    model = build()
    optimizer = optimizer_of(model)
    sync = DeAR(model, optimizer, **{**SMALL, **settings})
    train(model, model, optimizer, sync)
    sync.flush()
    sync.detach()
    return expected, state(model)


def check(outcomes: list[tuple[dict[str, Tensor], dict[str, Tensor]]], exact: bool = True) -> None:
    for expected, actual in outcomes:
        assert_same_state(actual, expected, exact)
        assert_same_state(actual, outcomes[0][1])


def plainly(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        (sync or optimizer).step()


def train_model(name: str, update: str) -> Any:
    return both(MODELS[name], plainly, update=update)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "reentrant"])
def test_models(name: str, update: str) -> None:
    check(launch(train_model, 2, name, update))


def train_reentrant() -> Any:
    """DDP with find_unused_parameters refuses reentrant checkpoints: what is compared is the other kind."""
    return both(MODELS["checkpointed"], plainly)[0], both(MODELS["reentrant"], plainly_with_dear_only)[1]


def plainly_with_dear_only(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    if sync:
        plainly(called, model, optimizer, sync)


def test_reentrant_checkpoints() -> None:
    check(launch(train_reentrant, 2))


def accumulate(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with (sync or called).no_sync():
            loss_of(called, 2 * step).backward()
        loss_of(called, 2 * step + 1).backward()
        (sync or optimizer).step()


def accumulate_twice_reduced(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    """Without no_sync; DDP then averages the first gradient twice, which changes nothing but the rounding."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, 2 * step).backward()
        loss_of(called, 2 * step + 1).backward()
        (sync or optimizer).step()


def train_accumulating(no_sync: bool) -> Any:
    return both(Backwards, accumulate if no_sync else accumulate_twice_reduced)


@pytest.mark.parametrize("no_sync", [True, False])
def test_accumulation(no_sync: bool) -> None:
    check(launch(train_accumulating, 2, no_sync), exact=no_sync)


def clipped(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        norm = sync.clip(0.1) if sync else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        (sync or optimizer).step()


def train_clipped(update: str) -> Any:
    return both(Backwards, clipped, update=update)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_clipping(update: str) -> None:
    check(launch(train_clipped, 3, update), exact=False)


def in_groups(model: nn.Module) -> Optimizer:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return SGD([{"params": weights, "weight_decay": 0.1, "momentum": 0.9}, {"params": biases, "lr": 0.5}], lr=0.1)


def scheduled(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(called, step).backward()
        (sync or optimizer).step()
        scheduler.step()


def train_in_groups(update: str) -> Any:
    return both(Backwards, scheduled, in_groups, update=update)


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_groups_and_a_schedule(update: str) -> None:
    check(launch(train_in_groups, 2, update))


def thawing(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    for step in range(STEPS):
        for parameter in model.get_submodule("first").parameters():
            parameter.requires_grad_(step >= 4)
        optimizer.zero_grad()
        loss_of(called, step).backward()
        (sync or optimizer).step()


def train_thawing() -> Any:
    """DDP has to be made anew when a parameter thaws: the reference averages by hand."""
    _, actual = both(Backwards, lambda called, model, optimizer, sync: sync and thawing(called, model, optimizer, sync))
    torch.manual_seed(0)
    model = Backwards()
    optimizer = AdamW(model.parameters(), lr=0.01)

    optimizer.register_step_pre_hook(lambda *_: average_gradients(model))
    thawing(model, model, optimizer, None)
    return state(model), actual


def test_frozen_parameters_may_thaw() -> None:
    check(launch(train_thawing, 2))


def two_optimizers(with_dear: bool) -> dict[str, Tensor]:
    """As in a GAN: the generator's loss also gives the discriminator gradients, which are thrown away."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": nn.Linear(6, 1)})
    generator, discriminator = model["generator"], model["discriminator"]
    optimizers = [SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (generator, discriminator)]
    sync = DeAR(model, optimizers, **SMALL) if with_dear else None
    for step in range(STEPS):
        x, _ = batch(step, dist.get_rank())
        for i, sign in enumerate((1, -1)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            faked = generator(x) if i == 0 else generator(x).detach()
            (sign * discriminator(faked)).mean().backward()
            if sync:
                sync.step(optimizer=optimizers[i])
                continue
            average_gradients(model)
            optimizers[i].step()
    if sync:
        sync.flush()
        sync.detach()
    return state(model)


def test_two_optimizers() -> None:
    check(list(zip(launch(two_optimizers, 2, False), launch(two_optimizers, 2, True), strict=True)))


def loss_by_scaler(with_dear: bool) -> dict[str, Tensor]:
    """What a loss scaler sees is the sum that is to be divided, also in the first step and with an unused layer."""
    torch.manual_seed(0)
    model = Twice()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = DeAR(model, optimizer, **SMALL) if with_dear else None
    scaler = GradScaler("cpu", init_scale=1024)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, step) * 1024).backward()
        if sync:
            scaler.scale(torch.zeros(()))  # the scale is made with the first loss
            sync.reduce(scaler=scaler)
            sync.step(lambda: scaler.step(optimizer))
            scaler.update()
            continue
        average_gradients(model, scale=1024)
        optimizer.step()
    if sync:
        sync.flush()
        sync.detach()
    return state(model)


def test_unscaling() -> None:
    check(list(zip(launch(loss_by_scaler, 2, False), launch(loss_by_scaler, 2, True), strict=True)))


class Normed(nn.Module):
    """Its hooks compute the weight from other parameters before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.weight_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def train_normed() -> Any:
    return both(Normed, plainly)


def test_hooks_that_read_weights_see_the_new_ones() -> None:
    check(launch(train_normed, 2))


def twice_backward(called: nn.Module, model: nn.Module, optimizer: Optimizer, sync: DeAR | None) -> None:
    """Two backward passes before a step, with a layer that only some ranks use."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        loss_of(model, step + 1).backward()
        if sync:
            sync.step()
            continue
        average_gradients(model)
        optimizer.step()


def train_twice_backward() -> Any:
    _, actual = both(
        Twice, lambda called, model, optimizer, sync: sync and twice_backward(called, model, optimizer, sync)
    )
    torch.manual_seed(0)
    model = Twice()
    twice_backward(model, model, AdamW(model.parameters(), lr=0.01), None)
    return state(model), actual


def test_ranks_that_use_other_layers_reduce_as_often() -> None:
    check(launch(train_twice_backward, 2))


def one_backward_for_two(with_dear: bool) -> dict[str, Tensor]:
    """One optimizer's weights are on their way while the other's gradient is clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizers = [SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    sync = DeAR(model, optimizers, **SMALL) if with_dear else None
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step).backward()
        if sync is None:
            average_gradients(model)
        for i, optimizer in zip((0, 2), optimizers, strict=True):
            if sync:
                sync.clip(0.05, optimizer)
                sync.step(optimizer=optimizer)
            else:
                nn.utils.clip_grad_norm_(model[i].parameters(), 0.05)
                optimizer.step()
    if sync:
        sync.flush()
        sync.detach()
    return state(model)


def test_one_backward_pass_for_two_optimizers() -> None:
    check(list(zip(launch(one_backward_for_two, 3, False), launch(one_backward_for_two, 3, True), strict=True)), False)
