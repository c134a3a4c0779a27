"""Clipping what the methods are about to apply."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.accelerate.optimizer import SynchronizedOptimizer
from lightning_pipesync.methods.method import AveragingMethod, parameters_of


def clip_norm(
    parameters: Sequence[Tensor], optimizers: Sequence[SynchronizedOptimizer], max_norm: float, norm_type: float
) -> Tensor:
    """Clips the gradients of ``parameters`` by their norm; returns the norm before, 0-dim.

    Raises:
        ValueError: no rank has the gradients, and these are not all of one optimizer, or it is not the L2 norm.
    """
    concerned = _with_gradients_of(parameters, optimizers)
    if _in_grad(concerned):
        torch.nn.utils.clip_grad_norm_(_clipped_along(parameters, concerned), max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    method, optimizer = _whole(parameters, concerned)
    if norm_type != 2:
        raise ValueError(f"DeAR knows the L2 norm of the averaged gradient only: leave out norm_type={norm_type}.")
    return method.clip(max_norm, optimizer)


def clip_value(parameters: Sequence[Tensor], optimizers: Sequence[SynchronizedOptimizer], max_value: float) -> None:
    """Clips every value of the gradients of ``parameters`` to ``[-max_value, max_value]``.

    Raises:
        ValueError: no rank has the gradients, and these are not all of one optimizer.
    """
    concerned = _with_gradients_of(parameters, optimizers)
    if _in_grad(concerned):
        torch.nn.utils.clip_grad_value_([*parameters, *_clipped_along(parameters, concerned)], max_value)
        return
    method, optimizer = _whole(parameters, concerned)
    method.clip_value(max_value, optimizer)


def _with_gradients_of(
    parameters: Sequence[Tensor], optimizers: Sequence[SynchronizedOptimizer]
) -> list[SynchronizedOptimizer]:
    """Returns the optimizers that have some of the parameters, and has their gradients be what will be applied."""
    given = {id(parameter) for parameter in parameters}
    concerned = [one for one in optimizers if one.method is not None and not given.isdisjoint(_ids(one))]
    for optimizer in concerned:
        optimizer.take_gradient()
    return concerned


def _clipped_along(parameters: Sequence[Tensor], optimizers: Sequence[SynchronizedOptimizer]) -> list[Tensor]:
    methods = {id(one.method): one.method for one in optimizers if one.method is not None}
    return [tensor for method in methods.values() for tensor in method.clipped_along(parameters)]


def _in_grad(optimizers: Sequence[SynchronizedOptimizer]) -> bool:
    return all(one.method is None or one.method.applies_grad for one in optimizers)


def _whole(
    parameters: Sequence[Tensor], optimizers: Sequence[SynchronizedOptimizer]
) -> tuple[AveragingMethod, Optimizer]:
    """Returns the method of the one optimizer whose parameters these are, and that optimizer."""
    given = {id(parameter) for parameter in parameters}
    if len(optimizers) > 1 or not _ids(optimizers[0]) <= given:
        raise ValueError(
            "With DeAR each rank has a part of the averaged gradient only: clip all parameters of one optimizer in one "
            f"call. This one was given {len(parameters)} tensors, and the optimizers that have some of them have "
            f"{', '.join(str(len(_ids(one))) for one in optimizers)}."
        )
    method = optimizers[0].method
    assert isinstance(method, AveragingMethod)
    return method, optimizers[0].optimizer


def _ids(optimizer: SynchronizedOptimizer) -> set[int]:
    return {id(parameter) for parameter in parameters_of(optimizer)}
