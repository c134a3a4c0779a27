"""Small models and data that need no download, the same in every process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer


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


def assert_same(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: object = "", exact: bool = True
) -> None:
    """Asserts that tensors are those that are expected, bit for bit or but for rounding."""
    for name, value in expected.items():
        if exact:
            assert torch.equal(actual[name], value), f"{what} {name}: off by {(actual[name] - value).abs().max()}"
        else:
            torch.testing.assert_close(actual[name], value)


class Run:
    """A network that this rank trains with a method.

    Args:
        optimizer: its name in :data:`OPTIMIZERS`, or what makes it.
        model: by default :func:`seeded_mlp`.
        settings: the method's.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        optimizer: str | Callable[[nn.Module], Optimizer] = "sgd",
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self.model = seeded_mlp() if model is None else model
        self.optimizer = (OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(self.model)
        self.sync = method(self.model, self.optimizer, **settings)
        self._begin = partial(Run, method, optimizer, **settings)

    def backward(self, number: int) -> None:
        """Computes the gradients of a step, in place of those before."""
        self.optimizer.zero_grad()
        loss(self.model, number, dist.get_rank()).backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.sync.step()

    def steps(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.step(number)

    def arrive(self, num_steps: int) -> tuple[dict[str, Tensor], float]:
        """Takes steps on ten batches in turns, and ends; returns the weights, and their loss on what two ranks have."""
        self.steps(i % 10 for i in range(num_steps))
        weights = self.end()
        with torch.no_grad():
            return weights, sum(loss(self.model, i, rank).item() for i in range(10) for rank in range(2)) / 20

    def resumed(self, model: nn.Module) -> Run:
        """Returns the run, saved and loaded: with another model, optimizer and method."""
        self.sync.flush()
        weights, of_optimizer = state(self.model), copy.deepcopy(self.sync.optimizer_state_dict(self.optimizer))
        saved = copy.deepcopy(self.sync.state_dict())
        self.sync.detach()
        other = self._begin(model)
        other.model.load_state_dict(weights)
        other.optimizer.load_state_dict(of_optimizer)
        other.sync.load_state_dict(saved)
        return other

    def end(self) -> dict[str, Tensor]:
        """Ends the method; returns the consolidated weights."""
        self.sync.flush()
        self.sync.detach()
        return state(self.model)


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


class Counter:
    """An object of the user's own in a checkpoint."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Averaged:
    """In place of a method: synchronous training with gradients that are averaged one by one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.model, self.reduced = model, False
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.no_sync = nullcontext

    def reduce(self, optimizer: Optimizer | None = None, scaler: GradScaler | None = None) -> None:
        if not self.reduced:
            average_gradients(self.model)
            self.reduced = True
        if scaler is not None:
            scaler.unscale_(optimizer or self.optimizers[0])

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        self.reduce()
        groups = (optimizer or self.optimizers[0]).param_groups
        return nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], max_norm)

    def clip_value(self, max_value: float) -> None:
        self.reduce()
        nn.utils.clip_grad_value_(self.model.parameters(), max_value)

    def step(self, update: Callable[[], object] | None = None, optimizer: Optimizer | None = None) -> None:
        self.reduce()
        (update or (optimizer or self.optimizers[0]).step)()
        self.reduced = False

    def optimizer_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        return (optimizer or self.optimizers[0]).state_dict()

    def flush(self) -> None: ...

    def detach(self) -> None: ...


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
