"""The stages of a step, and the steps of the user's optimizers, whose gradients must be complete before."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_pipesync.core.private_names import with_attributes
from lightning_pipesync.core.torch_private import handles_unscaling
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.module_hook import ModuleHook

if TYPE_CHECKING:
    from lightning_pipesync.methods.step_calls import StepCalls


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
        self._added_to: list[deque[Tensor]] = [deque(maxlen=1) for _ in range(num_optimizers)]
        if together:
            self._added_to = self._added_to[:1] * num_optimizers
        self._together = together
        self._stepping: int | None = None
        self._reduced_in_step = False  # by the optimizer that is stepping

    def gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        """Returns the hook to call after a backward pass has added to the gradient of a parameter."""
        return self._added_to[index].append

    def stage(self, index: int) -> Stage:
        return self._stages[index]

    def is_outdated(self, index: int) -> bool:
        """Returns whether a backward pass has added to the gradient since the method reduced it.

        Raises a RuntimeError if both happened during the step of this optimizer.
        """
        outdated = self._stages[index] > Stage.ACCUMULATING and bool(self._added_to[index])
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
        self._added_to[index].clear()
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


def check_unscaling(optimizer: Optimizer, precision: str, method: str) -> None:
    """Raises a ValueError if the user's optimizer unscales gradients in its step.

    The message names ``precision``, the setting that selects the loss scaler, and ``method``, which reads gradients.
    """
    if handles_unscaling(optimizer):
        raise ValueError(
            f"{precision} with a fused {type(optimizer).__name__} unscales gradients within the step, where {method} "
            "cannot read them: set fused=False."
        )


T = TypeVar("T")


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

    Refuses direct calls of ``optimizer.step()``, after which this rank's weights would differ from the other ranks',
    and steps of other optimizers, with gradients of the method's weights.
    """

    def __init__(self, sync: StepCalls) -> None:
        self._sync = sync
        self._allowed: list[Optimizer] = []  # those that may step now
        hook = register_optimizer_step_pre_hook(ModuleHook(self._refuse_step_of_others))
        self._remove = weakref.finalize(self, hook.remove)

    def release(self) -> None:
        self._remove()

    @contextmanager
    def allowing(self, *optimizers: Optimizer) -> Iterator[None]:
        """Context manager in which some of the method's optimizers may step by themselves."""
        before, self._allowed = self._allowed, [*self._allowed, *optimizers]
        try:
            yield
        finally:
            self._allowed = before

    def _refuse_step_of_others(self, optimizer: Optimizer, *_: object) -> None:
        own, method = self._sync.optimizers, type(self._sync).__name__
        if any(optimizer is known for known in own):
            if all(optimizer is not allowed for allowed in self._allowed):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() was called directly, so this rank's weights would differ from "
                    f"the other ranks'. Call the step() of {method}, or of the optimizer that self.optimizers() or "
                    "fabric.setup() returns."
                )
        elif not self._sync.record.is_stepping:  # otherwise it is what the user's optimizer wraps, or a wrapper of it
            trained = {id(parameter) for known in own for parameter in parameters_of(known)}
            if any(p.grad is not None and id(p) in trained for p in parameters_of(optimizer)):
                raise RuntimeError(not_passed(optimizer, method))

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

        with self.allowing(optimizer), with_attributes(optimizer, step=step):
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
