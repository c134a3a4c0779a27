"""Small models and data that need no download, the same in every process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from tests.harness import DIED, kill_stopped_siblings, launch, raised


def seeded_mlp(seed: int = 0, batch_norm: bool = False) -> nn.Module:
    """A two-layer network from 6 inputs to 3 classes."""
    torch.manual_seed(seed)
    norm: list[nn.Module] = [nn.BatchNorm1d(10)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 10), *norm, nn.Tanh(), nn.Linear(10, 3))


def batch(step: int, rank: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The batch that `rank` sees at `step`; its scale varies, so that the gradient's norm does."""
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    x = torch.randn(size, 6, generator=generator) * (1 + (step * 7 + rank * 3) % 5)
    y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    return x, y


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
}


def state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, detached from it."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_ddp(optimizer_name: str, num_steps: int) -> dict[str, Tensor]:
    """The state of a network that DDP has trained, on the batches of this rank."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS[optimizer_name](model)
    wrapped = DistributedDataParallel(model)
    for i in range(num_steps):
        optimizer.zero_grad()
        loss(wrapped, i, dist.get_rank()).backward()
        optimizer.step()
    return state(model)


def lose_a_peer(method: Callable[..., Any], how: str) -> tuple[tuple[str, str] | None, list[str]]:
    """Trains until rank 1 dies or hangs; returns what the other raised, and the method's threads that are left."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = method(model, optimizer)

    def train_on() -> None:
        for i in range(100):
            if i == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
            optimizer.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            sync.step()

    outcome = raised(train_on)
    sync.detach()
    if how == "hangs":
        kill_stopped_siblings()
    return outcome, [thread.name for thread in threading.enumerate() if "pipesync" in thread.name]


def assert_loss_is_noticed(method: Callable[..., Any], how: str) -> None:
    """Asserts that a rank whose peer dies or hangs raises, names it, and leaves no thread behind."""
    survived, died = launch(lose_a_peer, 2, method, how, may_die=(1,), timeout_s=60)
    assert died == DIED
    outcome, threads = survived
    assert outcome is not None
    assert outcome[0] == "RuntimeError"
    assert "rank 1" in outcome[1]
    assert threads == []


def average_gradients(model: nn.Module, scale: float = 1.0) -> None:
    """Divides gradients by ``scale`` and averages them, as DDP would; one that no rank has stays None."""
    for parameter in model.parameters():
        has_gradient = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(has_gradient)
        if not has_gradient:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size() * scale
