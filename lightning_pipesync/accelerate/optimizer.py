"""The optimizer that ``prepare`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from typing_extensions import override

from lightning_pipesync.accelerate.private import prepared_optimizers
from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.core.torch_private import found_overflow
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.session import Sessions
from lightning_pipesync.training.sharded_state import state_of_shards, whole_state


class SynchronizedOptimizer(ChecksOverrides, AcceleratedOptimizer):
    """Accelerate's optimizer whose step is taken by a method, when its model is prepared as well."""

    sessions: Sessions
    _skipped = False
    _is_plain = False
    _state_at_hand: dict[str, Any] | None = None

    @property
    def method(self) -> SyncMethod | None:
        """The method that takes the step; None until the model is prepared."""
        session = self.sessions.session_of(self.optimizer)
        return None if session is None else session.method

    def take_gradient(self) -> None:
        """Reduces and unscales the gradient of this step, before it is clipped; once in a step."""
        self._method().reduce(self.optimizer, self.scaler)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Takes the method's step, unless gradients are being accumulated; evaluates ``closure`` once."""
        if self._is_plain:
            self._create_states()
            return
        if not self.gradient_state.sync_gradients:
            return
        if closure is None:  # otherwise the method reduces what the closure computes
            self.take_gradient()
        self._method().step(lambda: self._update(closure), self.optimizer)

    @property
    @override
    def step_was_skipped(self) -> bool:
        return self._skipped

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state, of a sharded model on rank 0; a collective call if each rank has a part of it."""
        if self._is_plain:
            return super().state_dict()
        if self._state_at_hand is not None:
            return self._state_at_hand
        method = self.method
        state = super().state_dict() if method is None else method.optimizer_state_dict(self.optimizer)
        return whole_state(self.optimizer, state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state; of a sharded model each rank gets its shards."""
        super().load_state_dict(state_dict if self._is_plain else state_of_shards(self.optimizer, state_dict))

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Context manager in which the state is that of the user's optimizer, and a step only creates it.

        Gradients are put aside: ``torch.distributed.checkpoint`` creates no state of an optimizer that has some, and
        then saves and loads none. Methods that delay updates have gradients before they have states.
        """
        parameters = parameters_of(self.optimizer)
        gradients = [parameter.grad for parameter in parameters]
        self.optimizer.zero_grad(set_to_none=True)
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def state_at_hand(self) -> Iterator[None]:
        """Context manager in which :meth:`state_dict` is not a collective call; entering it is one."""
        self._state_at_hand = self.state_dict()
        try:
            yield
        finally:
            self._state_at_hand = None

    def _create_states(self) -> None:
        """Takes a step with gradients and a learning rate of 0, as torch has set them, which does not count."""
        self.optimizer.step()
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] *= 0

    def _update(self, closure: Callable[[], Any] | None) -> None:
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        if closure is not None:
            raise ValueError("mixed_precision='fp16' does not support closures: compute the gradient before the step.")
        self.scaler.step(self.optimizer)
        self._skipped = found_overflow(self.scaler, self.optimizer)
        self.scaler.update()

    def _method(self) -> SyncMethod:
        method = self.method
        if method is None:
            raise RuntimeError(
                f"The {type(self.optimizer).__name__} updates the parameters of no model that was prepared, so its "
                "gradients are not synchronized: call model, optimizer = accelerator.prepare(model, optimizer)."
            )
        return method


def synchronized_optimizers(accelerator: Accelerator) -> list[SynchronizedOptimizer]:
    """Returns the optimizers that an Accelerator has prepared for a method."""
    return [known for known in prepared_optimizers(accelerator) if isinstance(known, SynchronizedOptimizer)]
