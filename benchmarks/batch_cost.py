"""``python -m benchmarks.batch_cost``: time and memory of a step by mini-batch (SelSync, Fig. 2).

One worker with N times the mini-batch does as much work in a step as N workers of BSP: what that costs it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks import command
from benchmarks.resident_memory import forget_peak, map_tensors, peak_bytes, present_bytes
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.benchmark import Command, Progress, progress_bar, run_job
from lightning_pipesync.lab.bench.candidates import sgd
from lightning_pipesync.lab.bench.models import EMULATED, build_model, model_names
from lightning_pipesync.lab.bench.pictures import colour_and_line, picture
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.lab.netlab.command import LinkOptions


@dataclass(frozen=True, kw_only=True)
class BatchCost(Command):
    """Times a training step on one worker, and measures its memory, with larger and larger mini-batches.

    Attributes:
        models: cnn, transformer, transformer-14m, resnet50 or bert-base.
        batch_size: b, the mini-batch of a worker.
        workers: Values of N; the mini-batch is N times b.
        rounds: Steps of each mini-batch, in turns, of which the median is taken.
    """

    models: tuple[str, ...] = ("cnn", "transformer", "resnet50")
    batch_size: int = 2
    workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 5

    name = "batch_cost"

    def __post_init__(self) -> None:
        known = [name for name in model_names() if not name.startswith(EMULATED)]
        for model in self.models:
            if model not in known:
                raise ValueError(f"models: {model!r} is not known; there are {', '.join(known)}.")
        self._check_positive("batch_size", "rounds")
        self._check_all_positive("workers", self.workers, "numbers")

    def results(self) -> list[dict[str, Any]]:
        """Measures each model in a process of its own, which :func:`~.resident_memory.map_tensors` makes slower.

        Returns:
            Settings, environment, and ``models``: for each its name, the size of its weights in ``bytes``, and by
            mini-batch the median ``seconds`` of a step and the ``peak`` of its bytes, weights and gradients included.
        """
        found = []
        with progress_bar("", len(self.models) * len(self.workers)) as advance:
            for model in self.models:
                measured = run_job(BatchCost.measure, replace(self, models=(model,)), 1, LinkOptions(), advance)
                assert measured is not None
                found.append(measured)
        return [{"settings": self.settings(), "environment": environment(), "models": found}]

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Measures the only model of ``models`` in this process."""
        [name] = self.models
        times, peaks = self._times(name), []
        map_tensors()
        for workers in self.workers:
            peaks.append(self._peak(name, workers))
            progress(f"{name}, {workers} times the mini-batch")
        parameters = build_model(name, batch_size=1).module.parameters()
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        return {"model": name, "bytes": num_bytes, "seconds": times, "peak": peaks}

    def _times(self, name: str) -> list[float]:
        training, batches = _Training(name), [self._batch(name, workers) for workers in self.workers]
        seconds: list[list[float]] = [[] for _ in batches]
        for _ in range(self.rounds + 1):  # the first one allocates
            for batch, own in zip(batches, seconds, strict=True):
                start = time.perf_counter()
                training.step(batch)
                own.append(time.perf_counter() - start)
        return [median(own[1:]) for own in seconds]

    def _peak(self, name: str, workers: int) -> int:
        """Returns the bytes that the process has in memory, at most, more than before the model was built."""
        batch = self._batch(name, workers)
        before = present_bytes()
        training = _Training(name)
        training.step(batch)  # makes the gradients and the state of the optimizer
        forget_peak()
        training.step(batch)
        return peak_bytes() - before

    def _batch(self, name: str, workers: int) -> Any:
        return build_model(name, batch_size=workers * self.batch_size).make_batch(0)

    def report(self, results: list[dict[str, Any]]) -> str:
        [result] = results
        size, workers = result["settings"]["batch_size"], result["settings"]["workers"]
        rows = []
        for measured in result["models"]:
            for n, seconds, peak in zip(workers, measured["seconds"], measured["peak"], strict=True):
                times, memory = seconds / measured["seconds"][0], peak / measured["peak"][0]
                name = f"{measured['model']} ({measured['bytes'] / MIB:.0f} MiB)"
                cells = f"{seconds * 1e3:.0f}", f"{times:.2f}", f"{peak / MIB:.0f}", f"{memory:.2f}"
                rows.append([name, f"{n}", f"{n * size}", *cells])
        return f"""### One worker with N times the mini-batch (Fig. 2)

A step with SGD and momentum, and the most memory that it takes: weights, gradients, momentum and activations. One of N
workers of BSP takes the time and the memory of the first line of a model, besides communication.

{table(["", "N", "samples", "ms", "of N = 1", "MiB", "of N = 1"], rows)}"""

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws time and memory over the mini-batch, relative to the smallest."""
        [result] = results
        workers = result["settings"]["workers"]
        shared: dict[str, Any] = {"columns": 2, "legend": "below", "legend_columns": 4}
        with picture(self.output / "batch_cost.png", (9, 4), **shared) as [panels]:
            for panel, key, name in zip(panels, ("seconds", "peak"), ("time of a step", "memory"), strict=True):
                for number, measured in enumerate(result["models"]):
                    relative = [value / measured[key][0] for value in measured[key]]
                    panel.plot(workers, relative, "o-", label=measured["model"], color=colour_and_line(number)["color"])
                panel.plot(workers, [n / workers[0] for n in workers], ":k", label="linear")
                panel.set(xscale="log", yscale="log", xlabel="mini-batch over b", ylabel=f"{name} over that with b")
                panel.set_xticks(workers, map(str, workers))
                panel.set_yticks(workers, map(str, workers))
                panel.minorticks_off()
                panel.grid(alpha=0.3)


class _Training:
    """The training of a model, by mini-batches of any size."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self._model = build_model(name)
        self._optimizer = sgd(self._model.module.parameters())

    def step(self, batch: Any) -> None:
        self._optimizer.zero_grad()
        self._model.loss(self._model.module, batch).backward()
        self._optimizer.step()


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.batch_cost:BatchCost"))
