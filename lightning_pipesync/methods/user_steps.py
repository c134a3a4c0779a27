"""The steps of the user's optimizers: run as they are, or in place of a method's, once their gradients are complete."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_pipesync.core.private_names import with_attributes
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.module_hook import ModuleHook

if TYPE_CHECKING:
    from lightning_pipesync.methods.step_calls import StepCalls

T = TypeVar("T")


class StepGuard:
    """Refuses direct calls of ``optimizer.step()``, after which this rank's weights would differ from the other ranks'.

    ``method`` is the name of the method's class.
    """

    def __init__(self, optimizer: Optimizer, method: str) -> None:
        self._optimizer, self._method = optimizer, method
        self._is_stepping = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_step_of_others)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def release(self) -> None:
        self._hook.remove()

    def _refuse_step_of_others(self, *_: object) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step() was called directly, so this rank's weights would differ "
                f"from the other ranks'. Call the step() of {self._method}, or of the optimizer that "
                "self.optimizers() or fabric.setup() returns."
            )


def not_passed(optimizer: Optimizer | None, method: str) -> str:
    """Returns what an error says of an optimizer that was not passed to the method."""
    return (
        f"{type(optimizer).__name__} is not an optimizer that was passed to {method}. If it was made after the "
        "training had begun, change the one that was there instead: its param_groups, or its state by "
        "load_state_dict(). To train with another one, begin anew: under a Trainer by another fit(), whose "
        "configure_optimizers() makes it, else by detach() and attaching to it."
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


class UserSteps:
    """Runs what a user or a framework passes to :meth:`StepCalls.step`, with each call in its order.

    Steps of other optimizers, with gradients of the method's weights, are refused: they are those of this rank alone.

    ``guards`` are those of the optimizers.
    """

    def __init__(self, sync: StepCalls) -> None:
        self._sync = sync
        self.guards = [StepGuard(optimizer, type(sync).__name__) for optimizer in sync.optimizers]
        hook = register_optimizer_step_pre_hook(ModuleHook(self._refuse_stranger))
        self._remove = weakref.finalize(self, hook.remove)

    def release(self) -> None:
        self._remove()
        for guard in self.guards:
            guard.release()

    def _refuse_stranger(self, optimizer: Optimizer, *_: object) -> None:
        own = self._sync.optimizers
        # Within a step of the method it is what the user's optimizer wraps, or a wrapper of it.
        if self._sync.record.is_stepping or any(optimizer is known for known in own):
            return
        trained = {id(parameter) for known in own for parameter in parameters_of(known)}
        if any(p.grad is not None and id(p) in trained for p in parameters_of(optimizer)):
            raise RuntimeError(not_passed(optimizer, type(self._sync).__name__))

    def complete_gradient(self, index: int, by_closure: bool) -> None:
        """Called before an optimizer updates the weights: raises unless the gradient is reduced and unscaled.

        ``by_closure``: whether a closure has computed the gradient, which is then reduced unless the closure did.
        """
        if by_closure:
            self._sync.reduce(self._sync.optimizers[index])
        self._sync.record.check_unscaled(index)
        if not self._sync.applies_grad and not by_closure and is_scaler_stepping():
            self._sync.record.check_scaled(index)
        self._sync.check_gradient(index)

    def update_own(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights by its own optimizer, with ``update`` as in :meth:`StepCalls.step`.

        Raises:
            RuntimeError: a call is out of order.
        """
        optimizer = self._sync.optimizers[index]
        optimizer_step = optimizer.step
        whole = self._sync.whole_parameters(optimizer)

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            def evaluate() -> Any:
                result = None if closure is None else closure()
                self.complete_gradient(index, by_closure=update is None or closure is not None)
                if not is_skipped(optimizer):
                    self._sync.record.check_skipped(index)
                return result

            if whole is not None:
                result = evaluate()
                with whole:
                    updated = optimizer_step(**kwargs)
                return updated if closure is None else result
            if closure is None:
                evaluate()
                # A fused SGD that is left to skip its first step keeps momentum that was never initialized.
                return None if is_skipped(optimizer) else optimizer_step(**kwargs)
            return optimizer_step(evaluate, **kwargs)

        with self.guards[index].stepping(), with_attributes(optimizer, step=step):
            result = step() if update is None else update()
        self._sync.record.check_unscaled(index)
        return result

    def update_by_method(
        self,
        index: int,
        update: Callable[[], T] | None,
        apply: Callable[[Callable[[], Any]], object] = lambda optimizer_step: None,
        evaluate: Callable[[Callable[[], Any]], Any] = lambda closure: closure(),
    ) -> tuple[bool, T | None]:
        """Runs ``update`` for a method that updates the weights itself: the optimizer's step in it updates nothing.

        ``apply`` is called in place of the optimizer's step, which it is given, unless a loss scaler skips the step.
        ``evaluate`` evaluates a closure, after which the gradient is complete. Returns whether the weights are to be
        updated, which a loss scaler may skip, and the result of ``update``.

        Raises:
            RuntimeError: a call is out of order.
        """
        optimizer = self._sync.optimizers[index]
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

        with with_attributes(optimizer, step=step):
            result = step() if update is None else update()
        self._sync.record.check_unscaled(index)
        if stepped:
            self._sync.record.check_skipped(index)
        return stepped, result
