"""Small models and data that need no download, the same in every process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
