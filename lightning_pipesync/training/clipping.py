"""Clipping of the gradients that methods are about to apply, for all frameworks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.sync_method import SyncMethod

#: The step of one of the user's optimizers, whose gradient the method has reduced.
Step = tuple[SyncMethod, Optimizer]


def clip_norm(
    steps: Sequence[Step],
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips as :func:`torch.nn.utils.clip_grad_norm_`; ``steps`` are those of all optimizers with some ``parameters``.

    Raises:
        ValueError: each rank has only a part of the gradients, and ``parameters`` are not all of one optimizer's or
            ``norm_type`` is not 2.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    if all(method.applies_grad for method, _ in steps):
        clip = steps[0][0].clip_tensors
        clip(_clipped_along(steps, parameters), max_norm, norm_type)
        return clip(parameters, max_norm, norm_type, error_if_nonfinite)
    method, optimizer = _whole(steps, parameters)
    if norm_type != 2:
        raise ValueError(
            f"norm_type={norm_type!r}: each rank has a part of the averaged gradient, of which {method.name!r} "
            "computes the L2 norm only. Omit norm_type, or clip by value."
        )
    norm = method.clip(max_norm, optimizer)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The norm of the gradient is {norm.item()}, and the gradient cannot be clipped by it: find its cause, or "
            "set error_if_nonfinite=False."
        )
    return norm


def clip_value(steps: Sequence[Step], parameters: Sequence[Tensor], max_value: float) -> None:
    """Clips every value of the gradients of ``parameters`` to ``[-max_value, max_value]``.

    Raises:
        ValueError: each rank has only a part of the gradients, and these are not all of one optimizer.
    """
    if all(method.applies_grad for method, _ in steps):
        nn.utils.clip_grad_value_([*parameters, *_clipped_along(steps, parameters)], max_value)
    else:
        method, optimizer = _whole(steps, parameters)
        method.clip_value(max_value, optimizer)


def _clipped_along(steps: Sequence[Step], parameters: Sequence[Tensor]) -> list[Tensor]:
    methods = {id(method): method for method, _ in steps}
    return [tensor for method in methods.values() for tensor in method.clipped_along(parameters)]


def _whole(steps: Sequence[Step], parameters: Sequence[Tensor]) -> Step:
    """Returns the step of the optimizer that has exactly these parameters."""
    (method, optimizer), *others = steps
    if others or not {*map(id, parameters_of(optimizer))} <= {*map(id, parameters)}:
        raise ValueError(
            f"With {method.name!r} each rank has a part of the averaged gradient only: clip all parameters of "
            f"one optimizer in one call. This call has {len(parameters)} tensors, and the optimizers that have some of "
            f"them have {', '.join(str(len(parameters_of(one))) for _, one in steps)}."
        )
    return method, optimizer
