"""A trace of some steps of a running training, on all ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.core.trace import Trace, TraceRecorder, gather_traces, write_merged

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer
else:
    _Base = object


class TraceCallbackMixin(ChecksOverrides, _Base):
    """Records some batches with ``torch.profiler`` on all threads of all ranks, and writes one trace for Perfetto.

    Rank 0 writes it at the end of the training. It may be used with any strategy; with those of this package it shows
    what they communicate. A Trainer's own profiler cannot run ``torch.profiler`` at the same time.

    Args:
        path: the file, which https://ui.perfetto.dev opens; None: ``trace.json`` in the Trainer's ``default_root_dir``.
        first_step: the batches before the first one that is recorded, at least 1.
        num_steps: the batches that are recorded.

    Raises:
        ValueError: ``first_step`` or ``num_steps`` is not positive.
    """

    def __init__(self, path: str | Path | None = None, first_step: int = 10, num_steps: int = 3) -> None:
        for name, value in (("first_step", first_step), ("num_steps", num_steps)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value!r}.")
        self._path, self._first_step, self._num_steps = path, first_step, num_steps
        self._recorder: TraceRecorder | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder = TraceRecorder(self._first_step, self._num_steps)
        self._recorder.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None:
            self._recorder.end_step()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        traces = gather_traces(self._stop())
        if any(trace is not None for trace in traces):
            path = Path(self._path or Path(trainer.default_root_dir, "trace.json"))
            write_merged(path, {"": traces})
            print(f"Trace of {self._num_steps} batches: {path}. Open it in https://ui.perfetto.dev.")
        elif trainer.is_global_zero:
            warnings.warn(
                f"The training had no batch after first_step={self._first_step}: no trace was written.", stacklevel=2
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> Trace | None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        recorder.stop()
        return recorder.trace
