"""The outer step: moves the agreed weights towards the average of the replicas (DiLoCo, arXiv 2311.08105; SlowMo)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class OuterStep:
    """SGD with Nesterov momentum on the agreed weights, by the replicas' average movement away from them.

    DiLoCo's outer gradient is the negative of that movement. The arithmetic is, bit for bit, that of
    ``torch.optim.SGD(lr=lr, momentum=momentum, nesterov=True)`` (DiLoCo, Algorithm 1, lines 12 to 14). The same input
    gives the same bits on all ranks.

    Args:
        agreed: flat buffers with the agreed weights, the same on all ranks.
        lr: learning rate; 1 without momentum results in the average of the replicas.
        momentum: in [0, 1); 0 needs no memory.
    """

    def __init__(self, agreed: Sequence[Tensor], lr: float, momentum: float) -> None:
        self._agreed, self._lr, self._momentum = list(agreed), lr, momentum
        self._velocities = [torch.zeros_like(weights) for weights in agreed] if momentum else []

    @torch.no_grad()
    def step(self, index: int, movement: Tensor) -> None:
        """Takes a step on one of the buffers.

        Args:
            index: index of the buffer.
            movement: the ranks' average of their weights minus the agreed ones; overwritten.
        """
        if self._velocities:
            velocity = self._velocities[index].mul_(self._momentum).add_(movement)
            movement.add_(velocity, alpha=self._momentum)
        self._agreed[index].add_(movement, alpha=self._lr)

    def state_dict(self) -> dict[str, Any]:
        """Returns the momentum, on the CPU; the agreed weights are not included."""
        return {"velocities": [velocity.to("cpu", copy=True) for velocity in self._velocities]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned."""
        for velocity, value in zip(self._velocities, state["velocities"], strict=True):
            velocity.copy_(value)
