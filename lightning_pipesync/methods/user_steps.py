"""The steps of the user's optimizers: run as they are, or in place of a method's, once their gradients are complete."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pipesync.methods.step import StepRecord

T = TypeVar("T")


class StepGuard:
    """Refuses direct calls of ``optimizer.step()``, after which this rank's weights would differ from the other ranks'.

    Args:
        optimizer: the user's own optimizer.
        method: name of the method's class.
    """

    def __init__(self, optimizer: Optimizer, method: str) -> None:
        self._optimizer, self._method = optimizer, method
        self._is_stepping = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_step_of_others)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context manager in which the optimizer may step."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def release(self) -> None:
        """Removes the guard: the optimizer may step without the method again."""
        self._hook.remove()

    def _refuse_step_of_others(self, *_: object) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step() was called directly, so this rank's weights would differ "
                f"from the other ranks'. Call the step() of {self._method}, or of the optimizer that "
                "self.optimizers() or fabric.setup() returns."
            )


def is_scaler_stepping() -> bool:
    """Returns whether a loss scaler that is enabled makes the step. It leaves no other trace in the optimizer."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
    return False


def is_skipped(optimizer: Optimizer) -> bool:
    """Returns whether a loss scaler, which calls the step of a fused optimizer anyway, makes it skip the update."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any]) -> Iterator[None]:
    """Context manager that replaces ``optimizer.step`` by ``step``, also for wrappers of the optimizer."""
    own = vars(optimizer).get("step")
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]


class UserSteps:
    """Runs what a user or a framework passes to :meth:`SyncMethod.step`, with each call in its order.

    Args:
        optimizers: the user's own.
        method: name of the method's class.
        protocol: tells at which stage a step is.
        reduce: reduces the gradient of an optimizer.
        check: checks the gradient of an optimizer, by its index, that is about to step.
        unscales: whether the method unscales what it applies by itself, which is not in ``p.grad``.

    Attributes:
        guards: of each optimizer.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        method: str,
        protocol: StepRecord,
        reduce: Callable[[Optimizer], object],
        check: Callable[[int], object],
        unscales: bool,
    ) -> None:
        self._optimizers, self._protocol, self._reduce = optimizers, protocol, reduce
        self._check, self._unscales = check, unscales
        self.guards = [StepGuard(optimizer, method) for optimizer in optimizers]

    def release(self) -> None:
        """Removes the guards."""
        for guard in self.guards:
            guard.release()

    def complete_gradient(self, index: int, by_closure: bool) -> None:
        """Called before an optimizer updates the weights: the gradient must be complete.

        Args:
            index: of the optimizer.
            by_closure: whether a closure has computed the gradient, which is then reduced unless the closure did.

        Raises:
            RuntimeError: the gradient is not reduced, or not unscaled.
        """
        if by_closure:
            self._reduce(self._optimizers[index])
        self._protocol.check_unscaled(index)
        if self._unscales and not by_closure and is_scaler_stepping():
            self._protocol.check_scaled(index)
        self._check(index)

    def update_own(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights by its own optimizer.

        Args:
            index: of the optimizer.
            update: as in :meth:`SyncMethod.step`.

        Raises:
            RuntimeError: a call is out of order.
        """
        optimizer = self._optimizers[index]
        optimizer_step = optimizer.step

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            def evaluate() -> Any:
                result = None if closure is None else closure()
                self.complete_gradient(index, by_closure=update is None or closure is not None)
                if not is_skipped(optimizer):
                    self._protocol.check_skipped(index)
                return result

            if closure is None:
                evaluate()
                # A fused SGD that is left to skip its first step keeps momentum that was never initialized.
                return None if is_skipped(optimizer) else optimizer_step(**kwargs)
            return optimizer_step(evaluate, **kwargs)

        with self.guards[index].stepping(), replaced_step(optimizer, step):
            result = step() if update is None else update()
        self._protocol.check_unscaled(index)
        return result

    def update_by_method(
        self,
        index: int,
        update: Callable[[], T] | None,
        apply: Callable[[Callable[[], Any]], object] = lambda optimizer_step: None,
        evaluate: Callable[[Callable[[], Any]], Any] = lambda closure: closure(),
    ) -> tuple[bool, T | None]:
        """Runs ``update`` for a method that updates the weights itself: the optimizer's step in it updates nothing.

        Args:
            index: of the optimizer.
            update: as in :meth:`SyncMethod.step`.
            apply: called in place of the optimizer's step, which it is given, unless a loss scaler skips the step.
            evaluate: evaluates a closure, after which the gradient is complete.

        Returns:
            Whether the weights are to be updated, or a loss scaler skips the step; and the result of ``update``.

        Raises:
            RuntimeError: a call is out of order.
        """
        optimizer = self._optimizers[index]
        optimizer_step = optimizer.step
        stepped = False

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            nonlocal stepped
            result = None if closure is None else evaluate(closure)
            self.complete_gradient(index, by_closure=update is None or closure is not None)
            stepped = not is_skipped(optimizer)
            if stepped:
                apply(functools.partial(optimizer_step, **kwargs))
            return result

        with replaced_step(optimizer, step):
            result = step() if update is None else update()
        self._protocol.check_unscaled(index)
        if stepped:
            self._protocol.check_skipped(index)
        return stepped, result
