"""An Accelerator whose waits for other ranks name the rank at fault if one is lost."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from typing_extensions import override

from lightning_pipesync.core.faults.failure import PeerWatch, waits_for_all
from lightning_pipesync.core.faults.meeting import watch_job
from lightning_pipesync.core.private_names import ChecksOverrides


@waits_for_all("_job_watch", "wait_for_everyone", "gather", "reduce", "pad_across_processes")
class WatchedAccelerator(ChecksOverrides, Accelerator):
    """An Accelerator whose waits in the default process group end when a rank is lost, and name it."""

    _job_watch: PeerWatch | None = None

    def _watch_job(self, timeout_s: float) -> None:
        """Starts to watch all ranks; a collective call. RuntimeError if there is no process group any more."""
        if self.num_processes > 1:
            if not dist.is_initialized():
                raise RuntimeError(
                    "There is no process group any more: another Accelerator's end_training() has destroyed it, so "
                    "that this process cannot train again. Between two trainings call accelerator.free_memory()."
                )
            self._job_watch = watch_job(timedelta(seconds=timeout_s))

    def naming_ranks(self) -> AbstractContextManager[None]:
        """Context manager whose errors, if a lost rank has caused them, end with a line that names it."""
        return nullcontext() if self._job_watch is None else self._job_watch.naming()

    @override
    def end_training(self) -> None:
        if self._job_watch is not None:
            self._job_watch.close()
        super().end_training()

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        with self.naming_ranks():
            super().backward(loss, **kwargs)
