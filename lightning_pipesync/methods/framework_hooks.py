"""What a framework's adapter asks of a method and tells it, besides the calls of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer


class FrameworkHooks:
    """How methods differ for the Trainer, Fabric and Accelerate; a method overrides what differs for it.

    Attributes:
        applies_grad: whether ``p.grad`` holds the gradient that is about to be applied, once it is reduced.
        resumes_with_own_weights: whether this rank's own weights are in the module after ``load_state_dict``.
    """

    applies_grad: ClassVar[bool] = True
    resumes_with_own_weights: ClassVar[bool] = False

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks are at the same step, so that a framework may let them wait for each other at each one."""
        return True

    @property
    def diverged(self) -> bool:
        """Whether the weights may be this rank's own."""
        return False

    @property
    def trains_written_weights(self) -> bool:
        """Whether what a callback writes to the weights after :meth:`flush` stays, and is what training continues from.

        False if an update that is in flight, or the weights of a server, come on top.
        """
        return True

    def clipped_along(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` must be clipped in the same way as that of ``parameters``."""
        return []

    @property
    def has_left(self) -> bool:
        """Whether this job has left the others, which go on: all of its ranks have, after the same step."""
        return False

    def handle_sigterm(self, number: int, frame: Any) -> bool:
        """Called by the handler of SIGTERM; returns False if the method does nothing, otherwise it is to leave.

        Raises:
            SystemExit: there is nothing to wait for.
        """
        return False

    def begin_pass(self) -> None:
        """Called by a framework before the user's code computes a loss and may read any weights."""

    def end_pass(self) -> None:
        """Called by a framework after the last backward pass since :meth:`begin_pass`."""

    def finish(self, before_update: Callable[[Optimizer], object]) -> None:
        """Called by a framework after the last step of a training; a collective call.

        ``before_update`` is called before each further update, when ``p.grad`` holds its gradient.
        """

    def return_optimizer_states(self) -> None:
        """Restores the optimizers' whole state, which :meth:`detach` would drop; a collective call."""
