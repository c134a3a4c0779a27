"""The hyper-parameters that a delayed update uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import version

#: Learning rate and so on of each parameter group.
Hyperparameters = list[dict[str, Any]]


def current(optimizer: Optimizer) -> Hyperparameters:
    """Returns a copy of what the parameter groups hold besides parameters."""
    return copied(_groups(optimizer))


def copied(hyperparameters: Hyperparameters) -> Hyperparameters:
    """Returns a copy that shares no tensor."""
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in hyperparameters
    ]


@contextmanager
def in_use(optimizer: Optimizer, hyperparameters: Hyperparameters, later: Sequence[Hyperparameters]) -> Iterator[None]:
    """Within it ``optimizer`` has other hyper-parameters than now.

    A scheduler has moved on when a delayed update is made; the update uses what held when its gradient was computed.
    What the optimizer itself changes in its step (some count steps there) stays, and goes into those ``later``, too.
    Groups that were not there then keep what they have.
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
    """Returns what changes when a value is written in place."""
    return version(value) if isinstance(value, Tensor) else 0


def _differ(value: Any, other: Any, mark: int) -> bool:
    if value is other:
        return _mark(value) != mark
    return isinstance(value, Tensor) or bool(value != other)
