"""The small training that every runner makes: its network, batches, optimizers and options, and what comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.support.lightning_models import dataset

EPOCHS = 2
BATCHES = 4  # of an epoch, on each of two ranks: a part of those that there are
BATCH_SIZE = 4

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "lbfgs": lambda parameters: LBFGS(parameters),
    "muon": lambda parameters: Muon(parameters, lr=0.05),
    "zero": lambda parameters: ZeroRedundancyOptimizer(parameters, SGD, lr=0.05),
}


@dataclass(frozen=True)
class Options:
    """How a network is trained.

    Args:
        optimizer: its name in :data:`OPTIMIZERS`.
        lr_factor: of its learning rate.
        several: whether there are two optimizers, for a layer each, which are stepped in turns; ``"muon"`` is for
            the matrices of both layers, and has AdamW beside it for the rest.
        accumulate: batches whose gradients make one step.
        clip_norm: to which the gradient's L2 norm is clipped.
        clip_value: to which its values are clipped.
        precision: ``"32"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        loss_scale: with which 16-mixed precision begins.
        dropout: its probability.
        hidden: width of the hidden layer.
        device: type of the device that it is trained on.
        ranks: their number.
        ranks_per_replica: among which FSDP2 shards the network.
        seed: of the network, to which the number of the replica is added.
        batches: to which an epoch of a Trainer is limited.
        decay: of the learning rate, every three steps.
        timeout_s: of Accelerate's process group; None: its default.
        passes: called with the name of each place that the training passes, and with who trains there: a rank may be
            lost at any.
    """

    optimizer: str = "sgd"
    lr_factor: float = 1.0
    several: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: str = "32"
    loss_scale: float = 2.0**10
    dropout: float = 0.0
    hidden: int = 10
    device: str = "cpu"
    ranks: int = 2
    ranks_per_replica: int = 1
    seed: int = 0
    batches: float = BATCHES
    decay: float = 0.7
    timeout_s: float | None = None
    passes: Callable[[str, Any], Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a training saves, or resumes from.

    Args:
        path: where it is.
        at: batches that were trained on before; a checkpoint is saved whenever so many more were.
        after_error: whether a Trainer saves one after an error, too.
    """

    path: Path
    at: int
    after_error: bool = True

    @property
    def first(self) -> Checkpoint:
        """The first one that the training saves."""
        return Checkpoint(Path(f"{self.path}-{self.at}"), self.at)


@dataclass
class Result:
    """What a rank has after the training.

    Attributes:
        weights: the consolidated ones.
        seen: the samples of each batch.
        loaded: the weights right after a checkpoint was loaded.
        scale: of the loss at the end.
        norms: of the gradients, each before it is clipped.
        own: this rank's weights before they are consolidated.
    """

    weights: Tensor
    seen: list[list[int]]
    loaded: Tensor | None = None
    scale: float = 1.0
    norms: list[float] = field(default_factory=list)
    own: Tensor | None = None


def replica_of_process(options: Options) -> int:
    """Returns the seed of the network of this process's replica. That of replica 0 counts."""
    return options.seed + int(os.environ.get("RANK", "0")) // options.ranks_per_replica


class Passing(nn.Tanh):
    """A layer that has a place in the forward and in the backward pass; in a pipeline of two it is on rank 1."""

    def __init__(self, passes: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self.passes = passes

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.passes("forward", self)
            if x.requires_grad:
                x.register_hook(lambda _: self.passes("backward", self))
        return super().forward(x)


def network(options: Options, seed: int = 0) -> nn.Sequential:
    """Returns a classifier of 6 inputs."""
    torch.manual_seed(seed)
    activation = nn.Tanh() if options.passes is None else Passing(options.passes)
    hidden = options.hidden
    layers = nn.Sequential(nn.Linear(6, hidden), activation, nn.Dropout(options.dropout), nn.Linear(hidden, 2))
    return layers.to(options.device)


def pass_by(options: Options, place: str, who: Any) -> Any:
    """Tells the faults that `who` trains at `place`; returns what ends an epoch, if anything."""
    return None if options.passes is None else options.passes(place, who)


def optimizers_of(model: nn.Sequential, options: Options) -> list[Optimizer]:
    """Returns new ones, before a method is attached."""
    pass_by(options, "attach", model)
    parts = [model[0], model[3]] if options.several else [model]
    names, parameters = [options.optimizer] * len(parts), [list(part.parameters()) for part in parts]
    if options.optimizer == "muon":
        names = ["muon", "adamw"]
        parameters = [[p for p in model.parameters() if (p.dim() == 2) == matrices] for matrices in (True, False)]
    optimizers = [OPTIMIZERS[name](own) for name, own in zip(names, parameters, strict=True)]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] *= options.lr_factor
    return optimizers


def scheduler_of(optimizer: Optimizer, options: Options) -> StepLR:
    """Returns a schedule of learning rates that counts steps."""
    return StepLR(optimizer, 3, options.decay)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Returns the loss, computed in 32 bits whatever the precision of the network."""
    return nn.functional.cross_entropy(output.float(), y)


def scaler_of(options: Options, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(options.device, init_scale=options.loss_scale, growth_interval=3, enabled=enabled)


def order(rank: int, ranks: int = 2) -> list[list[int]]:
    """Returns the samples of each batch of all epochs, in a loop whose data no framework orders."""
    batches = []
    for epoch in range(EPOCHS):
        samples = torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).tolist()[rank::ranks]
        batches += [samples[i : i + BATCH_SIZE] for i in range(0, BATCHES * BATCH_SIZE, BATCH_SIZE)]
    return batches


def batch_of(indices: list[int]) -> tuple[Tensor, Tensor]:
    _, x, y = dataset()[torch.tensor(indices)]
    return x, y


def flat(model: nn.Module) -> Tensor:
    """Returns all parameters in one vector on the CPU; a collective call if they are sharded."""
    return flat_state(dict(model.named_parameters()))


def flat_state(state: dict[str, Any]) -> Tensor:
    """Returns all tensors of a ``state_dict`` in one vector on the CPU, sorted by name, as some files are."""
    return torch.cat([whole(state[name].detach()).flatten() for name in sorted(state)]).cpu()


def whole(value: Tensor) -> Tensor:
    """Returns a tensor itself, or all of one that is sharded, in a collective call."""
    return value.full_tensor() if isinstance(value, DTensor) else value
