"""The callback that plans for the user's own training, in its first batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.lab.bench.timing import StepRecorder
from lightning_pipesync.lab.plan.advice import Advice, advice, is_usual
from lightning_pipesync.lab.plan.measure import plan_for
from lightning_pipesync.lab.plan.report import write_plan
from lightning_pipesync.lab.plan.saved import of_result
from lightning_pipesync.lab.plan.trials import gathered
from lightning_pipesync.lab.plan.work import measured_by_methods
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.lightning.distribution import Callback

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer
else:
    _Base = object


class PlanCallbackMixin(ChecksOverrides, _Base):
    """Plans for a training that runs: ``pipesync plan`` with the Trainer's own model, batches and hosts.

    It measures the first optimizer steps, then the network, for some seconds in which the training waits. Rank 0 prints
    the plan, with a line on what would be faster in this training, and writes ``plan.json``, ``plan.md`` and
    ``plan.png``. The training goes on as if it was not there. Use it with ``strategy="ddp"``, over Gloo or NCCL.

    Args:
        output: folder of the plan; None: ``plan`` in the Trainer's ``default_root_dir``.
        num_steps: the steps that are measured, and one more before.

    Raises:
        ValueError: ``num_steps`` is not positive.
        ModuleNotFoundError: matplotlib, which draws the plan, is not installed.
    """

    def __init__(self, output: str | Path | None = None, num_steps: int = 20) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps must be positive, got {num_steps!r}.")
        check_extra("plan", type(self).__name__, "matplotlib")
        self._output, self._num_steps = output, num_steps
        self._recorder: StepRecorder | None = None
        self._advice: Advice | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to record; ValueError if there is one rank only, or a strategy other than DDP."""
        is_ddp = isinstance(trainer.model, DistributedDataParallel)
        if trainer.world_size < 2 or not dist.is_initialized() or not is_ddp:
            raise ValueError(
                f"PlanCallback plans for several ranks in DDP, and this Trainer has {trainer.world_size} and "
                f"{type(trainer.strategy).__name__}: set Trainer(strategy='ddp', devices=..., num_nodes=...)."
            )
        self._recorder = StepRecorder(pl_module, Clock(pl_module.device))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._recorder is not None:
            self._recorder.begin_forward()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.begin_backward()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._recorder is not None:
            self._recorder.begin_update()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        recorder = self._recorder
        if recorder is None or not recorder.end():
            return  # a batch that is accumulated
        if recorder.num_steps > self._num_steps:
            self._recorder = None
            recorder.close()
            work = Work(recorder.profile(), measured_by_methods(pl_module, trainer.optimizers[0], None))
            result = plan_for(work, pl_module, {"model": type(pl_module).__name__}, lambda _: None)
            pace = gathered(recorder.pace())
            if not trainer.is_global_zero:
                return
            planned = of_result(result)
            print(write_plan(Path(self._output or Path(trainer.default_root_dir, "plan")), *planned))
            if is_usual(trainer):
                now = ("ddp", "none", None)
                self._advice = advice(now, trainer.optimizers[0], pace, *planned[:2], trainer.global_step)
            if self._advice is not None:
                print(self._advice.line())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.close()
            if trainer.is_global_zero:
                warnings.warn(
                    f"The training had {self._recorder.num_steps} optimizer steps, of {self._num_steps} that are to be "
                    "measured after the first one, with automatic optimization: no plan was made.",
                    stacklevel=2,
                )
            self._recorder = None
        if self._advice is not None and (line := self._advice.last_line(trainer.global_step)) is not None:
            print(line)
        self._advice = None


class PlanCallback(PlanCallbackMixin, Callback):
    __doc__ = PlanCallbackMixin.__doc__
