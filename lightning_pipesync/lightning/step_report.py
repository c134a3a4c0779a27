"""What the steps of a running training take: reports of time and of what has become slower, and traces."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.core.torch_private import ddp_seconds_waited, time_steps
from lightning_pipesync.core.trace import Trace, TraceRecorder, gather_traces, write_merged
from lightning_pipesync.methods.method import network_metrics
from lightning_pipesync.training.rank_times import RankTimes, report

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
    from lightning.pytorch import LightningModule, Trainer
else:
    _Base = object

#: The first batches of a training, which are not counted.
WARM_UP = 5

#: Computation, or waiting, that takes so many times as long as at the start, or as was planned, is a drift.
DRIFT = 1.25

#: A loss that varies by less than this share of itself is flat.
FLAT = 1e-6


@dataclass
class _Window:
    """Some batches in a row: seconds of each, seconds of each that were waited for the network, and their losses."""

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @property
    def computed(self) -> float:
        """The seconds of a batch, usually, without those that were waited."""
        return median(all_ - waited for all_, waited in zip(self.seconds, self.waited, strict=True))


class StepReportMixin(ChecksOverrides, _Base):
    """Logs what a batch takes and which share of it waits for the network, and warns of what has become slower.

    It logs ``step_report/seconds`` and, with a method of this package or DDP, ``step_report/waited``, the share from 0
    to 1, of each ``every_n_batches`` batches; what a batch takes is without its loading. Warnings come from the rank
    that they are about: it computes for longer than at the start, its loss is flat, its gradient is 0; on rank 0 that a
    batch takes longer than was planned. Ranks tell each other nothing, so that nobody waits, before the end of the
    training: then, with ``table``, rank 0 prints what each rank has spent its time on, and who is slow.

    Args:
        plan: ``plan.json`` of ``pipesync plan`` for this model; None: there is none.
        every_n_batches: the batches of a report.
        table: whether a table of all ranks is printed at the end of the training.

    Raises:
        ValueError: ``plan`` is no such file, or ``every_n_batches`` is not positive.
    """

    def __init__(self, plan: str | Path | None = None, every_n_batches: int = 50, table: bool = False) -> None:
        if every_n_batches < 1:
            raise ValueError(f"every_n_batches must be positive, got {every_n_batches!r}.")
        self._every, self._predictions = every_n_batches, [] if plan is None else _read_predictions(Path(plan))
        self._num_batches = 0
        self._window, self._first = _Window(), _Window()
        self._began = 0.0  # of a batch
        self._waited: float | None = None  # before it
        self._sent: float | None = None  # before the training
        self._times = RankTimes() if table else None
        self._warned: set[str] = set()
        self._told = 1.0  # how much slower than at the start this rank has said that it is

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            time_steps(trainer.strategy.model)
        self._sent = _metric(trainer, "mib_sent")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._began, self._waited = perf_counter(), _seconds_waited(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if len(self._window.seconds) != self._every - 1:
            return  # once a report
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients and not torch.nn.utils.get_total_norm(gradients):
            self._warn(
                "gradient",
                "all gradients are 0: a codec may have rounded them to 0, or the loss does not depend on the weights. "
                "Try compression='none', or scale the loss.",
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._num_batches <= WARM_UP:
            return
        window = self._window
        seconds, waited = perf_counter() - self._began, _difference(_seconds_waited(trainer), self._waited)
        window.seconds.append(seconds)
        window.waited.append(waited or 0.0)
        if self._times is not None:
            self._times.add(seconds, waited)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            window.losses.append(loss.detach())
        if len(window.seconds) == self._every:
            self._report(trainer, window)
            self._first = self._first if self._first.seconds else window
            self._window = _Window()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._times is not None:
            self._times.mib_sent = _difference(_metric(trainer, "mib_sent"), self._sent)
            report(self._times)

    def _report(self, trainer: Trainer, window: _Window) -> None:
        seconds = fmean(window.seconds)
        metrics = {"step_report/seconds": seconds}
        if _seconds_waited(trainer) is not None:
            metrics["step_report/waited"] = fmean(window.waited) / seconds
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        if trainer.is_global_zero:
            self._compare_with_plan(trainer, seconds)
        ratio = window.computed / self._first.computed if self._first.seconds else 1.0
        if ratio > DRIFT * self._told:  # also after it was told, when it has become as much slower again
            self._told = ratio
            _say(f"its computation of a batch takes {ratio:.1f} times as long as at the start.")
        elif ratio <= DRIFT:
            self._told = 1.0
        losses = [float(loss) for loss in window.losses]
        if len(losses) > 1 and max(losses) - min(losses) <= FLAT * abs(losses[0]):
            self._warn("loss", f"the loss has been {losses[0]:g} for {self._every} batches: nothing is learned.")

    def _compare_with_plan(self, trainer: Trainer, seconds: float) -> None:
        """Warns if a batch takes longer than was planned for the method, with the settings that are most alike."""
        strategy: Any = trainer.strategy
        trained_by = "ddp" if isinstance(trainer.model, DistributedDataParallel) else type(strategy).__name__
        method, config = getattr(strategy, "name", trained_by), getattr(strategy, "config", None)
        planned = [prediction for prediction in self._predictions if prediction["method"] == method]
        if not planned:
            return

        def likeness(prediction: Mapping[str, Any]) -> tuple[bool, int]:
            settings = prediction["settings"]
            usual = {"low_rank": None, "compression": "none"}  # others train otherwise
            same_training = all(getattr(config, name, of) == settings.get(name, of) for name, of in usual.items())
            return same_training, sum(getattr(config, name, None) == value for name, value in settings.items())

        predicted = max(planned, key=likeness)["seconds"]
        if seconds > DRIFT * predicted:
            self._warn(
                "plan", f"a batch takes {1e3 * seconds:.0f} ms, and was planned to take {1e3 * predicted:.0f} ms."
            )

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _say(text)


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


def _say(text: str) -> None:
    warnings.warn(f"{socket.gethostname()}: {text}", stacklevel=3)


def _seconds_waited(trainer: Trainer) -> float | None:
    """Returns the seconds that this rank has waited for others; None: nobody counts."""
    if isinstance(trainer.strategy.model, DistributedDataParallel):
        return ddp_seconds_waited(trainer.strategy.model)
    return _metric(trainer, "exposed_seconds")


def _metric(trainer: Trainer, name: str) -> float | None:
    """Returns what a method counts; None: it has no transport, or there is no method."""
    transport = getattr(getattr(trainer.strategy, "method", None), "transport", None)
    return None if transport is None else network_metrics(transport.traffic)[name]


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _read_predictions(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())["results"][0]["predictions"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"plan={str(path)!r} is not the plan.json of pipesync plan: {type(error).__name__}: {error}."
        ) from error
    return found
