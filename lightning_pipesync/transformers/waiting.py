"""Callbacks of a user, which read the weights after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from lightning_pipesync.transformers.trainer import PipeSyncTrainerMixin

#: The events at which transformers gives callbacks the model between a step and the next forward pass.
AFTER_STEP = ("on_optimizer_step", "on_step_end", "on_log", "on_epoch_end", "on_epoch_begin", "on_step_begin")


class WaitingCallback(TrainerCallback):
    """Waits, before a user's callbacks, for weights that are on their way after a step, so that all are of one step.

    The Trainer gives callbacks the user's own model, whose parameters nothing watches. Where no callback but those of
    transformers looks at it, weights go on to arrive under the next forward pass.
    """

    def __init__(self, trainer: PipeSyncTrainerMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if any(_looks(callback) for callback in self._trainer.callback_handler.callbacks if callback is not self):
            self._trainer.accelerator.synchronize()


def _looks(callback: object) -> bool:
    """Returns whether a callback is not one of transformers, and does something after a step."""
    own = type(callback)
    of_transformers = own.__module__.partition(".")[0] == "transformers"
    return not of_transformers and any(
        getattr(own, event) is not getattr(TrainerCallback, event) for event in AFTER_STEP
    )
