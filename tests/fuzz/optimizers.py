"""Optimizers and schedulers that are drawn. To add one, give it a line in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

Options = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A class of optimizers.

    Attributes:
        options: the values of each option, of which the first is drawn as often as the others together.
        lr: its learning rate.
        elementwise: whether it updates each element independently of the others.
        refused: words of the error by which every method refuses it.
        accepts: which parameters it takes; an AdamW gets the others.
    """

    options: dict[str, Sequence[Any]] = field(default_factory=dict)
    lr: float = 0.01
    elementwise: bool = True
    refused: str = ""
    accepts: Callable[[Tensor], bool] = lambda parameter: True


_DECAY: dict[str, Sequence[Any]] = {
    "weight_decay": [0.0, 0.1],
    "maximize": [False, True],
    "foreach": [None, True, False],
}
_FUSED: dict[str, Sequence[Any]] = {"fused": [None, True]}
_BETAS: dict[str, Sequence[Any]] = {"betas": [(0.9, 0.999), (0.5, 0.9)]}
_DECOUPLED: dict[str, Sequence[Any]] = {"decoupled_weight_decay": [False, True]}

OPTIMIZERS: dict[str, Kind] = {
    "SGD": Kind(
        {"momentum": [0.0, 0.9], "nesterov": [False, True], "dampening": [0.0, 0.1], **_DECAY, **_FUSED}, lr=0.05
    ),
    "Adam": Kind({"amsgrad": [False, True], **_BETAS, **_DECOUPLED, **_DECAY, **_FUSED}),
    "AdamW": Kind({"amsgrad": [False, True], **_BETAS, **_DECAY, **_FUSED}),
    "Adagrad": Kind({"lr_decay": [0.0, 0.1], "initial_accumulator_value": [0.0, 0.1], **_DECAY, **_FUSED}),
    "Adadelta": Kind({"rho": [0.9, 0.5], **_DECAY}, lr=0.5, elementwise=False),
    "NAdam": Kind({"momentum_decay": [4e-3, 0.1], **_BETAS, **_DECOUPLED, **_DECAY}),
    "RAdam": Kind({**_BETAS, **_DECOUPLED, **_DECAY}),
    "Adamax": Kind({**_BETAS, **_DECAY}),
    "ASGD": Kind({"t0": [1e6, 2.0], "lambd": [1e-4, 0.1], **_DECAY}),
    "Rprop": Kind({"maximize": [False, True], "foreach": [None, True, False]}, elementwise=False),
    "RMSprop": Kind({"momentum": [0.0, 0.9], "centered": [False, True], **_DECAY}),
    # PyTorch's own default of eps is that of the first parameter's dtype for all parameters.
    "Adafactor": Kind(
        {"d": [1.0, 0.5], "eps": [(1e-7, 1e-3)], **_DECAY},
        elementwise=False,
        accepts=lambda parameter: parameter.numel() > 0,
    ),
    "Muon": Kind({"nesterov": [True, False]}, elementwise=False, accepts=lambda parameter: parameter.dim() == 2),
    "LBFGS": Kind(refused="LBFGS"),
}
OPTIMIZERS = {name: kind for name, kind in OPTIMIZERS.items() if hasattr(torch.optim, name)}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "warmup": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer,
        0.02,
        total_steps=40,
        cycle_momentum=any({"momentum", "betas"} & group.keys() for group in optimizer.param_groups),
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


#: Layers with parameters that have no gradient in some steps.
PARTIAL = {"alternating", "by_replica", "by_data", "thawed"}


def draw_options(random: Random, name: str, layers: Sequence[str]) -> Options:
    """Draws options with which the optimizer can be made, and train a model with these layers."""
    while True:
        kind = OPTIMIZERS[name]
        options = {
            key: values[0] if random.random() < 0.5 else random.choice(values) for key, values in kind.options.items()
        }
        options["lr"] = kind.lr
        try:
            getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))], **options)
        except (ValueError, RuntimeError):  # momentum of nesterov, foreach with fused
            continue
        if "momentum" in options and PARTIAL & {*layers}:
            # PyTorch's fused SGD refuses a step in which only some have a momentum, which a schedule may give, too.
            options.pop("fused", None)
        return options


def optimizers_of(
    model: nn.Module, blocks: Sequence[nn.Module], name: str, options: Options, num_groups: int, num_optimizers: int
) -> list[Optimizer]:
    """Returns optimizers over a model; with several, each has every second block, and the last has what is left."""
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
    all_parameters, optimizers = list(model.parameters()), []
    first: list[nn.Parameter] = []
    if num_optimizers == 2:
        of_first = {id(p) for block in blocks[::2] for p in block.parameters()}
        first = [p for p in all_parameters if id(p) in of_first]
    taken = {id(p) for p in first}
    for parameters in filter(None, (first, [p for p in all_parameters if id(p) not in taken])):
        accepted = [p for p in parameters if OPTIMIZERS[name].accepts(p)]
        others = [p for p in parameters if not OPTIMIZERS[name].accepts(p)]
        if accepted:
            optimizers.append(getattr(torch.optim, name)(_groups(accepted, options, num_groups), **options))
        if others:
            optimizers.append(torch.optim.AdamW(others, lr=0.01))
    return optimizers


def _groups(parameters: list[nn.Parameter], options: Options, number: int) -> list[Any]:
    if number == 1:
        return parameters
    matrices, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    if not matrices or not rest:
        return parameters
    other = {"lr": options["lr"] * 2}
    if "weight_decay" in options:
        other["weight_decay"] = 0.01
    return [{"params": matrices}, {"params": rest, **other}]
