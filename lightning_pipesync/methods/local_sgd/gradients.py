"""Gradients that are averaged in each step: in a warm-up (post-local SGD), and in a group that trains one replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import foreach_norm
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.replicas.flags import raise_if_not_all_consolidate, raise_if_not_all_loaded
from lightning_pipesync.methods.replicas.gradients import GradientAggregation
from lightning_pipesync.methods.replicas.groups import exchange_flags

# The bits of a rank's flag: a parameter has no gradient; its gradient is not finite.
MISSING_GRADIENT, NOT_FINITE = 1, 2


class SynchronousGradients:
    """Averages the gradients of an optimizer in each step, as DDP does.

    Args:
        optimizer: the user's own.
        buckets: its parameters.
        transport: the way to the other ranks.
        in_group: whether the ranks of a group average them, or all.
    """

    def __init__(
        self, optimizer: Optimizer, buckets: Sequence[list[Tensor]], transport: Transport, in_group: bool = False
    ) -> None:
        self._optimizer, self._buckets, self._transport = optimizer, buckets, transport
        self._row = transport.row if in_group else None
        self._known = {id(tensor) for bucket in buckets for tensor in bucket}
        self._gradients = GradientAggregation(buckets, self._row or transport, "none", False)

    def average(self) -> bool:
        """Averages the gradients; a collective call.

        Returns:
            Whether the gradient of some rank is not finite.

        Raises:
            RuntimeError: the optimizer has got parameters that are not averaged; some rank is about to consolidate the
                weights; or a peer is lost.
        """
        if any(id(p) not in self._known and p.requires_grad for p in parameters_of(self._optimizer)):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} has got further parameters, whose gradients are not averaged: set "
                f"{'warmup_steps=0' if self._row is None else 'replicas_per_group=1'}, or add them before the training."
            )
        gradients = [p.grad for bucket in self._buckets for p in bucket if p.grad is not None]
        missing = len(gradients) < sum(map(len, self._buckets))
        finite = not gradients or bool(torch.stack(foreach_norm(gradients)).isfinite().all())
        flag = MISSING_GRADIENT * missing | NOT_FINITE * (not finite)
        flags = exchange_flags(self._transport, flag) if self._row is None else self._row.exchange_flags(flag).wait()
        ranks = (self._row or self._transport).ranks
        raise_if_not_all_loaded(flags, ranks)
        raise_if_not_all_consolidate(flags, ranks)
        self._gradients.average(some_missing=any(flag & MISSING_GRADIENT for flag in flags))
        return any(flag & NOT_FINITE for flag in flags)
