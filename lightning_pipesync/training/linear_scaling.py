"""Learning rates of large mini-batches: the linear scaling rule with gradual warm-up (Goyal et al., 2017)."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override


class LinearScalingLR(LRScheduler):
    """Multiplies the learning rates of any schedule by ``factor``, after a linear warm-up from 1 (Sections 2.1, 2.2).

    If the global mini-batch is k times as large as the one that the learning rates were chosen for, they are to be k
    times as large. At step t they are those of the schedule at step t, times 1 + (k - 1) min(t / warmup_steps, 1): the
    schedule continues under the warm-up. What else changes the learning rates between two steps, such as a callback, or
    ``ReduceLROnPlateau`` beside this scheduler, changes those that are shown, and the change stays.

    [Note: why torch's schedulers do not suffice]
    A warm-up in a ``ChainedScheduler`` multiplies the present learning rates, which ``LambdaLR``, ``OneCycleLR`` and
    others replace at every step. ``SequentialLR`` would begin the schedule only after the warm-up, and from the
    learning rates that the schedule copied when it was made, which are not scaled.

    Attributes:
        factor: the factor k.
        warmup_steps: the number of steps until k is reached.
        scheduler: the schedule, or None.

    Args:
        optimizer: the optimizer, with the original learning rates.
        warmup_steps: number of steps of the warm-up; 0 for none. The paper's is five epochs.
        factor: k, positive; None: the number of ranks, each of which has a mini-batch of the original size.
        scheduler: a schedule of the same optimizer, which this one steps; None: constant learning rates.

    Raises:
        ValueError: a setting is out of its range, the schedule is of another optimizer or needs a metric, or ``factor``
            is None and the process group is not initialized.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        factor: float | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        if factor is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise ValueError(
                    "factor=None stands for the number of ranks, which is not known yet: call init_process_group() "
                    "first, or set factor."
                )
            factor = dist.get_world_size()
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"factor must be a positive number, got {factor!r}.")
        if warmup_steps < 0 or warmup_steps != int(warmup_steps):
            raise ValueError(f"warmup_steps must be a number of steps, 0 or more, got {warmup_steps!r}.")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler=ReduceLROnPlateau steps with a metric, which this scheduler does not get: leave it out here "
                "and step it beside this one, whose learning rates it then reduces."
            )
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ValueError(f"scheduler={type(scheduler).__name__} belongs to another optimizer.")
        self.factor, self.warmup_steps, self.scheduler = float(factor), int(warmup_steps), scheduler
        self._unscaled = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    @property
    def scale(self) -> float:
        """What the schedule's learning rates are multiplied by at the present step."""
        if self.last_epoch >= self.warmup_steps:
            return self.factor
        return 1.0 + (self.factor - 1.0) * self.last_epoch / self.warmup_steps

    @override
    def get_lr(self) -> list[float | Tensor]:
        return [lr * self.scale for lr in self._unscaled]

    @override
    def step(self) -> None:  # type: ignore[override]
        if self.last_epoch >= 0:  # else the base class has called this to set the first learning rates
            self._step_unscaled()
        super().step()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the state, with that of the schedule, and without the settings: those of a resumed run hold."""
        state = {name: value for name, value in super().state_dict().items() if name not in ("factor", "warmup_steps")}
        return {**state, "scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state; the learning rates themselves are in that of the optimizer.

        Raises:
            ValueError: a schedule was saved and there is none, or the other way round.
        """
        if (state_dict["scheduler"] is None) != (self.scheduler is None):
            saved = "no schedule" if self.scheduler else "a schedule"
            raise ValueError(f"The saved state has {saved}, but scheduler={self.scheduler!r}: give the same one.")
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "scheduler"})

    def _step_unscaled(self) -> None:
        """Steps the schedule, with unscaled learning rates in the optimizer."""
        groups = self.optimizer.param_groups
        for i, group in enumerate(groups):
            known = i < len(self._last_lr) and float(group["lr"]) == float(self._last_lr[i])
            _set_lr(group, self._unscaled[i] if known else float(group["lr"]) / self.scale)
        if self.scheduler is not None:
            self.scheduler.step()
        self._unscaled = [float(group["lr"]) for group in groups]


def _set_lr(group: dict[str, Any], lr: float) -> None:
    """Sets a learning rate, in place if it is a tensor, which a compiled step refers to."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
