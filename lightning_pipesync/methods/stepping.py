"""Who may step an optimizer that a method has taken over, and what its step does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import handles_unscaling


class StepGuard:
    """Refuses a step that a method does not know of: this rank's weights would part from all others'.

    Args:
        optimizer: the user's own.
        method: name of the method's class.
    """

    def __init__(self, optimizer: Optimizer, method: str) -> None:
        self._optimizer, self._method = optimizer, method
        self._is_stepping = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_step_of_others)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within it the optimizer may step."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def release(self) -> None:
        """Lets the optimizer step without the method again."""
        self._hook.remove()

    def _refuse_step_of_others(self, *_: object) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step() was called directly: this rank would go its own way, and no "
                f"other would know. Call the step() of {self._method}, or of the optimizer that self.optimizers() "
                "or fabric.setup() returns."
            )


def check_unscaling(optimizer: Optimizer, precision: str, method: str) -> None:
    """Checks that a loss scaler leaves gradients unscaled in ``p.grad`` before the step of ``optimizer``.

    Args:
        optimizer: the user's own.
        precision: the setting that has brought the scaler.
        method: who has to see the gradients.

    Raises:
        ValueError: it does not.
    """
    if handles_unscaling(optimizer):
        raise ValueError(
            f"{precision} with a fused {type(optimizer).__name__} unscales gradients within the step, where {method} "
            "cannot see them: set fused=False."
        )


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any]) -> Iterator[None]:
    """Within it ``optimizer.step`` is ``step``, also for who has put something around it before."""
    own = vars(optimizer).get("step")
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]
