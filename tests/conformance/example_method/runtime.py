"""Gradient averaging in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.sync_method import SyncMethod
from tests.conformance.example_method.config import AveragingConfig

T = TypeVar("T")


class Averaging(SyncMethod):
    """Synchronous SGD: averages the gradients over the ranks after the backward pass, and nothing else."""

    name = "averaging"
    config_type = AveragingConfig
    same_weights = True

    config: AveragingConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        """There is nothing to prepare: the gradients are averaged when they are complete."""

    @torch.no_grad()
    def _reduce(self, index: int, loss_scale: float | None) -> None:
        parameters = self._trained(self.optimizers[index])
        present = self.transport.union([parameter.grad is not None for parameter in parameters]).wait()
        gradients: list[Tensor] = []
        for parameter, somewhere in zip(parameters, present, strict=True):
            if somewhere:  # on some rank: a gradient that is missing here counts as zero
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        exchange_fused(gradients, self.config.bucket_mb, lambda flat: self.transport.all_reduce(flat, mean=True))

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        return self.user_steps.update_own(index, update)

    def flush(self) -> None:
        """Gives all ranks the buffers of rank 0; the weights are the same already. A collective call."""
        self._compare_loaded()
        self._broadcast_buffers()
        self.flushed = True

    def resume(self) -> None:
        """Continues from the flushed weights."""
        self.flushed = False

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: a plain checkpoint holds all that a rank needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing, see :meth:`state_dict`."""
