"""The record of the stages of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import handles_unscaling

SCALER_RECIPE = (
    "With a loss scaler, call sync.reduce(scaler=scaler), sync.step(lambda: scaler.step(optimizer)) "
    "and scaler.update()."
)


class Stage(IntEnum):
    """The stage of an optimizer in its step."""

    ACCUMULATING = 0
    """Backward passes add to ``p.grad``."""
    REDUCED = 1
    """The gradient is complete, and the method has reduced it. A loss scaler may unscale it."""
    UNSCALED = 2
    """The gradient that will be applied is unscaled. It may be clipped, and the optimizer may step."""


class StepRecord:
    """Tracks the stage of each optimizer of a method, the same for all loops and frameworks.

    A backward pass that adds to a reduced gradient makes that outdated: the user has skipped the step, or continues
    to accumulate. ``together`` is whether the gradients of all optimizers are reduced at the same time.
    """

    def __init__(self, num_optimizers: int, together: bool = False) -> None:
        self._stages = [Stage.ACCUMULATING] * num_optimizers
        self._overflowed, self._scaled = [False] * num_optimizers, [False] * num_optimizers
        # Gradients that a backward pass has added to since they were reduced. deque.append, the hook, is not in Python.
        self._added_to: list[deque[Tensor]] = [deque(maxlen=1) for _ in range(1 if together else num_optimizers)]
        self._together = together
        self._stepping: int | None = None
        self._reduced_in_step = False  # by the optimizer that is stepping

    def gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        """Returns the hook to call after a backward pass has added to the gradient of a parameter."""
        return self._added_by(index).append

    def stage(self, index: int) -> Stage:
        return self._stages[index]

    def is_outdated(self, index: int) -> bool:
        """Returns whether a backward pass has added to the gradient since the method reduced it.

        Raises a RuntimeError if both happened during the step of this optimizer.
        """
        outdated = self._stages[index] > Stage.ACCUMULATING and bool(self._added_by(index))
        if outdated and index == self._stepping and self._reduced_in_step:
            raise RuntimeError(
                "A backward pass has added to a gradient after it was reduced in the same step: call reduce() "
                "when the gradient is complete, and evaluate a closure only once."
            )
        return outdated

    def awaited_beside(self, index: int) -> list[int]:
        """Returns the other optimizers whose gradients were reduced by themselves, and are still to be applied."""
        others = () if self._together else (one for one in range(len(self._stages)) if one != index)
        return [one for one in others if self._stages[one] > Stage.ACCUMULATING and not self.is_outdated(one)]

    def restart(self, index: int) -> None:
        self._stages[index] = Stage.ACCUMULATING

    def reduced(self, index: int) -> None:
        for one in range(len(self._stages)) if self._together else (index,):
            self._stages[one] = Stage.REDUCED
        self._added_by(index).clear()
        self._reduced_in_step = index == self._stepping

    def unscaled(self, index: int, overflow: bool, scaled: bool) -> None:
        """Records that the gradient is unscaled, whether it was scaled, and whether it is not finite on some rank."""
        self._stages[index] = Stage.UNSCALED
        self._overflowed[index], self._scaled[index] = overflow and scaled, scaled

    def check_unscaled(self, index: int) -> None:
        """Raises a RuntimeError unless the gradient that is about to be applied is reduced and unscaled."""
        if self._stages[index] < Stage.UNSCALED or self.is_outdated(index):
            raise RuntimeError(
                "The gradient was not reduced before the optimizer stepped: call reduce() when it is complete, "
                f"before or within update, and after the last backward pass. {SCALER_RECIPE}"
            )

    def check_scaled(self, index: int) -> None:
        """Raises a RuntimeError if the gradient was reduced as if no loss scaler made the optimizer step."""
        if not self._scaled[index]:
            raise RuntimeError(
                f"The method was not told of the loss scaler, and would apply the scaled gradient. {SCALER_RECIPE}"
            )

    def check_skipped(self, index: int) -> None:
        """Raises a RuntimeError if the gradient of some rank is not finite, so that the step must be skipped."""
        if self._overflowed[index]:
            raise RuntimeError(
                f"The gradient of some rank is not finite, and this rank did not skip the step. {SCALER_RECIPE}"
            )

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer's step is being taken."""
        return self._stepping is not None

    @contextmanager
    def stepping(self, index: int) -> Iterator[None]:
        """Context manager around an optimizer's step; afterwards the optimizer accumulates again."""
        self._stepping, self._reduced_in_step = index, False
        try:
            yield
        finally:
            self._stepping = None
        self._stages[index] = Stage.ACCUMULATING

    def _added_by(self, index: int) -> deque[Tensor]:
        return self._added_to[0 if self._together else index]


def check_unscaling(optimizer: Optimizer, precision: str, method: str) -> None:
    """Raises a ValueError if the user's optimizer unscales gradients in its step.

    The message names ``precision``, the setting that selects the loss scaler, and ``method``, which reads gradients.
    """
    if handles_unscaling(optimizer):
        raise ValueError(
            f"{precision} with a fused {type(optimizer).__name__} unscales gradients within the step, where {method} "
            "cannot read them: set fused=False."
        )
