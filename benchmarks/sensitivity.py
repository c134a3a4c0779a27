"""``python -m benchmarks.sensitivity``: how gradients change during a training (SelSync, Figs. 3, 4 and 5)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import benchmarks.tasks.mnist1d
import benchmarks.tasks.signals  # noqa: F401 - both add themselves to the tasks
from benchmarks import command
from benchmarks.gradients.densities import check_layer
from benchmarks.gradients.training import train
from benchmarks.intervals import mean_of
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.pictures import COLOURS, colour_and_line, picture
from lightning_pipesync.lab.bench.tables import environment, table

Run = dict[str, Any]
Point = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Command):
    """Trains, and watches the gradient: its density, its relative change beside the quality, and the Hessian.

    BSP with N workers is one process with N times the mini-batch.

    Attributes:
        tasks: digits, signals, mnist1d (classification) or topics (a language model).
        workers: N.
        seeds: A training of each task for each of these.
        epochs: Of each training; the task's own if not given.
        evaluations: How often the quality and the Hessian are measured in a training.
        samples: Of the training set, the same always, on which the Hessian and the variance are measured.
        window: Steps over which the squared norm of the gradient is smoothed.
        smoothing: Weight of the newest step; the paper's for 16 workers.
    """

    tasks: tuple[str, ...] = ("digits", "signals", "topics")
    workers: int = 4
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: int | None = None
    evaluations: int = 16
    samples: int = 32
    window: int = 25
    smoothing: float = 0.16

    name = "sensitivity"

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_layer(task)
        if not self.seeds:
            raise ValueError("seeds must be one or more numbers.")
        self._check_positive("workers", "evaluations", "samples", "window")
        if self.epochs is not None:
            self._check_positive("epochs")
        if self.samples % 8:
            raise ValueError(f"samples={self.samples} must be a multiple of 8, the mini-batches of which it consists.")
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing must be above 0 and at most 1, got {self.smoothing!r}.")

    def results(self) -> list[dict[str, Any]]:
        """Trains each task with each seed; returns settings, environment and a run of :func:`train` for each."""
        runs = []
        with progress_bar("", len(self.tasks) * len(self.seeds)) as advance:
            for task in self.tasks:
                for seed in self.seeds:
                    runs.append(train(task, seed, self))
                    advance(f"{task}, seed {seed}")
        return [{"settings": self.settings(), "environment": environment(), "runs": runs}]

    def report(self, results: list[dict[str, Any]]) -> str:
        runs = [run for result in results for run in result["runs"]]
        return "\n".join(part(runs) for part in (_densities, _hessians, _changes))

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws, of the first seed of each task: densities, the Hessian beside the gradient, changes beside quality."""
        firsts = {run["task"]: run for run in reversed(results[-1]["runs"])}
        runs = [firsts[task] for task in results[-1]["settings"]["tasks"]]
        several = partial(picture, size=(4.5 * len(runs), 3.8), columns=len(runs), legend="below", legend_columns=3)
        with several(self.output / "sensitivity_density.png") as [panels]:
            for panel, run in zip(panels, runs, strict=True):
                for number, (density, name) in enumerate(zip(run["densities"], _EPOCHS, strict=False)):
                    panel.plot(run["grid"], density["density"], label=name, **colour_and_line(number))
                panel.set(xlabel="gradient", ylabel="density", yscale="log")
                panel.locator_params(axis="x", nbins=5)
                panel.set_title(f"{run['task']}, {run['layer']}", fontsize="medium")
        with several(self.output / "sensitivity_hessian.png") as [panels]:
            for panel, run in zip(panels, runs, strict=True):
                for number, (key, name) in enumerate(_BESIDE.items()):
                    values = _values(run, key)
                    relative = [value / max(values) for value in values]
                    panel.plot(_values(run, "steps"), relative, label=name, **colour_and_line(number))
                panel.set(xlabel="step", ylabel="of its maximum", yscale="log", title=run["task"])
                panel.grid(alpha=0.3)
        with several(self.output / "sensitivity_change.png") as [panels]:
            for panel, run in zip(panels, runs, strict=True):
                steps, quality = _values(run, "steps"), panel.twinx()
                panel.plot(steps, _values(run, "change"), color=COLOURS[1], label="relative change")
                quality.plot(steps, _values(run, "quality"), color=COLOURS[0])
                panel.plot([], [], color=COLOURS[0], label="quality")
                panel.set(xlabel="step", ylabel="relative gradient change (Eq. 2)", yscale="log", title=run["task"])
                quality.set_ylabel(run["metric"])


#: The epochs whose densities are drawn (Fig. 3).
_EPOCHS = ("first epoch", "middle epoch", "last epoch")
#: What is drawn beside each other (Fig. 4), by its key in a point.
_BESIDE = {
    "eigenvalue": "largest eigenvalue of the Hessian",
    "variance": "variance of the gradient",
    "squared_norm": "squared norm of the gradient, smoothed",
}


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns Spearman's rank correlation, which no scale changes; 0 where one of the two never changes."""
    from scipy.stats import spearmanr

    return 0.0 if len(set(x)) < 2 or len(set(y)) < 2 else float(spearmanr(x, y).statistic)


def changes(values: Sequence[float]) -> list[float]:
    """Returns the differences of successive values, without their sign."""
    return [abs(after - before) for before, after in pairwise(values)]


def relative_changes(values: Sequence[float]) -> list[float]:
    """Returns the differences of successive values over the former one, without their sign (as Eq. 2)."""
    return [abs(after / before - 1) for before, after in pairwise(values)]


def follows_curvature(run: Run, key: str) -> tuple[float, float]:
    """Returns the rank correlation of a value with the Hessian's largest eigenvalue, and that of their changes."""
    eigenvalues, values = _values(run, "eigenvalue"), _values(run, key)
    return correlation(eigenvalues, values), correlation(relative_changes(eigenvalues), relative_changes(values))


def moves_with_quality(run: Run) -> float:
    """Returns the rank correlation of the relative change of the gradient with how much the quality has moved."""
    return correlation(_values(run, "change")[1:], changes(_values(run, "quality")))


def _values(run: Run, key: str) -> list[float]:
    return [point[key] for point in run["points"]]


def by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Returns the runs of each task."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run["task"], []).append(run)
    return found


def _densities(runs: list[Run]) -> str:
    rows = []
    for task, of_task in by_task(runs).items():
        for densities in zip(*(run["densities"] for run in of_task), strict=True):
            deviations = [density["deviation"] for density in densities]
            near = [100 * density["near_zero"] for density in densities]
            rows.append([f"{task}, epoch {densities[0]['epoch']}", mean_of(deviations, ".2g"), mean_of(near, ".0f")])
    return f"""### Densities of the gradient (Fig. 3)

Of one layer, in all steps of an epoch: the standard deviation, and the share of values closer to 0 than a tenth of that
in the first epoch.

{table(["", "standard deviation", "near 0, %"], rows)}"""


def _hessians(runs: list[Run]) -> str:
    rows = []
    for task, of_task in by_task(runs).items():
        for key in ("variance", "squared_norm"):
            levels, moves = zip(*(follows_curvature(run, key) for run in of_task), strict=True)
            rows.append([f"{task}, {_BESIDE[key]}", mean_of(levels), mean_of(moves)])
    return f"""### The Hessian beside the gradient (Fig. 4)

Rank correlation of the largest eigenvalue of the Hessian with what is cheaper to compute, during a training; and that
of their relative changes from one measurement to the next.

{table(["", "correlation", "of the changes"], rows)}"""


def _changes(runs: list[Run]) -> str:
    rows = []
    for task, of_task in by_task(runs).items():
        found = [moves_with_quality(run) for run in of_task]
        thirds = [len(run["points"]) // 3 for run in of_task]
        early = [fmean(_values(run, "change")[:third]) for run, third in zip(of_task, thirds, strict=True)]
        late = [fmean(_values(run, "change")[-third:]) for run, third in zip(of_task, thirds, strict=True)]
        ends = [run["points"][-1]["quality"] for run in of_task]
        rows.append([task, mean_of(found), mean_of(early, ".3f"), mean_of(late, ".3f"), mean_of(ends)])
    return f"""### The relative gradient change beside the quality (Fig. 5)

Rank correlation of the mean relative change (Eq. 2) since the last measurement with how much the quality has moved
since; and the mean change in the first and in the last third of a training.

{table(["", "correlation", "change, first third", "last third", "final quality"], rows)}"""


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.sensitivity:Sensitivity"))
