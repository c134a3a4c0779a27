"""Hooks of a user's that run between a step and the next forward pass, where they may read and write weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pipesync.fabric.private import LIGHTNING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Of modules and of callbacks. Before all others that run there, the weights are consolidated.
HOOKS = ("optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start")
#: Their own hooks wait where they read weights.
LIBRARIES = (*LIGHTNING, "lightning_pipesync")


def has_hooks_between_steps(trainer: Trainer) -> bool:
    """Returns whether the module, or a callback that is not one of the libraries', overrides such a hook."""
    owners = [trainer.lightning_module, *vars(trainer)["callbacks"]]
    return any(_overrides(owner, hook) for owner in owners for hook in HOOKS)


def _overrides(owner: object, hook: str) -> bool:
    if hook in vars(owner):  # as of a LambdaCallback
        return True
    found = next((cls for cls in type(owner).__mro__ if hook in vars(cls)), None)
    return found is not None and found.__module__.partition(".")[0] not in LIBRARIES
