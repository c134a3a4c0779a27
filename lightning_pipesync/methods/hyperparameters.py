"""Hyper-parameters of delayed updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import version

#: Learning rate, weight decay and so on, of each parameter group.
Hyperparameters = list[dict[str, Any]]


def current(optimizer: Optimizer) -> Hyperparameters:
    """Returns a copy of the hyper-parameters of the optimizer's parameter groups."""
    return copied(_groups(optimizer))


def copied(hyperparameters: Hyperparameters) -> Hyperparameters:
    """Returns a copy that shares no tensor with the original."""
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in hyperparameters
    ]


@contextmanager
def in_use(optimizer: Optimizer, hyperparameters: Hyperparameters, later: Sequence[Hyperparameters]) -> Iterator[None]:
    """Context manager in which ``optimizer`` has the given hyper-parameters.

    A delayed update uses the hyper-parameters of the step that computed its gradient; a scheduler may have changed them
    since. Values that the optimizer itself changes in its step (some count steps there) are kept, and copied to
    ``later``. Parameter groups that were added since keep their values.
    """
    before = _groups(optimizer)
    for group, used in zip(optimizer.param_groups, hyperparameters, strict=False):
        group.update(used)
    put = [{name: (value, _mark(value)) for name, value in group.items()} for group in _groups(optimizer)]
    try:
        yield
    finally:
        for index, (old, used, now) in enumerate(zip(before, put, _groups(optimizer), strict=True)):
            changed = {name: value for name, value in now.items() if name not in used or _differ(value, *used[name])}
            optimizer.param_groups[index].update({**old, **changed})
            for other in later:
                other[index : index + 1] = [{**group, **changed} for group in other[index : index + 1]]


def _groups(optimizer: Optimizer) -> Hyperparameters:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _mark(value: Any) -> int:
    """Returns a version number that changes when a tensor is written in place; 0 for other values."""
    return version(value) if isinstance(value, Tensor) else 0


def _differ(value: Any, other: Any, mark: int) -> bool:
    if value is other:
        return _mark(value) != mark
    return isinstance(value, Tensor) or bool(value != other)
