"""The passes of a learner, which an update may cancel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.parameters import NamedParameter, hook_gradient, modules_with_parameters
from lightning_pipesync.methods.gradients.module_hook import ModuleHook
from lightning_pipesync.methods.servers.learner import Learner

T = TypeVar("T")


class PassCancelled(BaseException):
    """Ends a pass whose gradient would not be used. A BaseException, so that users' handlers of errors let it pass."""


class CancellablePasses:
    """Cancels passes at the next layer, if there are newer weights, and repeats those in a closure.

    Attributes:
        num_cancelled: the number of cancelled passes.

    Args:
        learner: knows which weights there are.
        cancels: whether an update cancels passes.
        is_synced: returns whether a pass is not to be accumulated with later ones.
        start_anew: called after a cancelled pass; it fetches newer weights.
    """

    def __init__(
        self, learner: Learner, cancels: bool, is_synced: Callable[[], bool], start_anew: Callable[[], object]
    ) -> None:
        self.num_cancelled = 0
        self._learner, self._cancels = learner, cancels
        self._is_synced, self._start_anew = is_synced, start_anew
        self._may_cancel = self._accumulates = False

    def hook(self, module: nn.Module, parameters: Sequence[NamedParameter]) -> list[RemovableHandle]:
        """Registers the hooks at which a pass can end; returns their handles."""
        if not self._cancels:
            return []
        check = ModuleHook(self.cancel_if_late)
        hooks = [child.register_forward_pre_hook(check) for child in modules_with_parameters(module)]
        return hooks + [hook_gradient(p.tensor, self._after_gradient) for p in parameters if p.group]

    @property
    def is_late(self) -> bool:
        """Whether a gradient at this rank's weights would not be used."""
        return self._cancels and self._learner.newest > self._learner.version

    def evaluate(self, closure: Callable[[], T]) -> T:
        """Evaluates a closure with a forward and a backward pass, again whenever its pass is cancelled."""
        while True:
            self._may_cancel = self._cancels and not self._accumulates
            try:
                return closure()
            except PassCancelled:
                self.num_cancelled += 1
                self._start_anew()
            finally:
                self._may_cancel = False

    def end_step(self) -> None:
        """Ends a step: the next pass begins without a gradient of earlier ones."""
        self._accumulates = False

    def cancel_if_late(self, *_: object) -> None:
        """Ends the pass in a closure if there are newer weights, and if it can be repeated."""
        if self._may_cancel and self.is_late:
            raise PassCancelled

    def _after_gradient(self, _: Tensor) -> None:
        self._accumulates |= not self._is_synced()  # what an earlier pass has added could not be repeated
        self.cancel_if_late()
