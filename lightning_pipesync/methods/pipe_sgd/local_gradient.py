"""What a rank has computed of a gradient in flight, with which it predicts the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_pipesync.core.norm import SquaredNorm
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import foreach_mul_
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig


class LocalGradient:
    """The unscaled gradient that this rank has computed, until the average of all ranks is applied.

    Attributes:
        values: by the id of the parameter; None for zeros, as all are with ``delay_compensation="momentum"``. Empty if
            no weights are predicted with it.
    """

    def __init__(self, members: Sequence[NamedParameter], config: PipeSGDConfig) -> None:
        self._members, self._config = members, config
        self.values: dict[int, Tensor | None] = {}
        self._norm = SquaredNorm([])

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite. Otherwise the average is not finite either, and predicts nothing."""
        return math.isfinite(self._norm.item())

    def keep(self, loss_scale: float, grad_is_reused: bool) -> None:
        """Takes ``p.grad``, ``loss_scale`` times too large; without a copy, unless its memory will be written to."""
        pairs = [(id(m.tensor), m.tensor.grad.detach()) for m in self._members if m.tensor.grad is not None]
        if not self._config.keeps_local_gradients:
            self.values = dict.fromkeys([key for key, _ in pairs])
            return
        gradients = [gradient.clone() if grad_is_reused else gradient for _, gradient in pairs]
        if loss_scale != 1.0:
            foreach_mul_(gradients, 1 / loss_scale)
        self._set(dict(zip([key for key, _ in pairs], gradients, strict=True)))

    def grad_holders(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` is this gradient, for each of ``parameters`` that has values."""
        found = [self.values.get(id(parameter)) for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        holders = [gradient.detach() for gradient in gradients]
        for holder, gradient in zip(holders, gradients, strict=True):
            holder.grad = gradient
        return holders

    def clear(self) -> None:
        """Drops the values, with which nothing is predicted any more."""
        self.values = {}

    def state_dict(self) -> dict[str, Tensor | None]:
        """Returns the values by name, on the CPU; None for zeros, and with ``checkpoint_own_gradients=False``."""
        state: dict[str, Tensor | None] = {}
        for member in self._members:
            if id(member.tensor) in self.values:
                gradient = self.values[id(member.tensor)]
                saved = gradient is not None and self._config.checkpoint_own_gradients
                state[member.name] = gradient.to("cpu", copy=True) if saved and gradient is not None else None
        return state

    def load_state_dict(
        self, state: Mapping[str, Tensor | None], averages: Mapping[str, Tensor], loss_scale: float
    ) -> None:
        """Loads what :meth:`state_dict` returned; values that were not saved become those of the scaled averages."""
        members = [member for member in self._members if member.name in state]
        if not self._config.keeps_local_gradients:
            self.values = dict.fromkeys([id(member.tensor) for member in members])
            return
        gradients = {}
        for member in members:
            values, average = state[member.name], averages[member.name] / loss_scale
            gradients[id(member.tensor)] = average if values is None else values.to(average.device, copy=True)
        self._set(gradients)

    def _set(self, gradients: dict[int, Tensor]) -> None:
        self.values = {**gradients}
        self._norm = SquaredNorm(list(gradients.values()))
