"""``python -m benchmarks.pipeline``: pipelines with delayed gradients (EA-Pipe, Section IV, Tables 1-7, Figs. 3, 4)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks import command
from benchmarks.intervals import interval_of, with_interval
from benchmarks.named_settings import readable
from benchmarks.pipelines.grid import train_at_once
from benchmarks.pipelines.training import AT_ONCE, PipelineOptions, train
from lightning_pipesync.lab.bench.benchmark import progress_bar
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.tables import environment, table

Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pipeline(PipelineOptions):
    """Trains with several pipelines at several learning rates, all stages in this process: the error that each leaves.

    Attributes:
        output: Folder for pipeline.json, pipeline.md and the pictures.
    """

    name = "pipeline"

    def results(self) -> list[dict[str, Any]]:
        """Trains with every method at every learning rate and batch size, for each seed.

        Returns:
            Settings, environment, and ``runs``: the results of :func:`~.pipelines.training.train`.
        """
        task, runs = self.build_task(), []
        grid = list(itertools.product(self.batch_sizes, self.seeds, self.learning_rates, self.methods))
        if self.model in AT_ONCE:
            trainings = train_at_once(task, self)
        else:
            trainings = (train(task, method, rate, size, seed, self) for size, seed, rate, method in grid)
        with progress_bar(f"{self.stages} stages", len(grid)) as advance:
            for run in trainings:
                runs.append(run)
                outcome = "diverged" if run["diverged"] else f"{run['points'][-1]['error']:.2f} %"
                advance(f"{run['method']}, learning rate {run['learning_rate']:g}, seed {run['seed']}: {outcome}")
        return [{"settings": self.settings(), "environment": environment(), "runs": runs}]

    def report(self, results: list[dict[str, Any]]) -> str:
        """Returns tables of methods by learning rates, for each batch size, and of what the validation set chooses."""
        [result], count = results, len(self.seeds)
        shown = f"mean of {count} trainings ± 95 % confidence interval" if count > 1 else "one training"
        text = f"""### {self.model} on {self.task}, {self.stages} stages

Test error in % after {self.epochs} epochs, momentum {self.momentum:g}, by learning rate: {shown}.
Diverged: a loss or a weight was not finite.
"""
        for size in self.batch_sizes:
            rows = [
                [
                    readable(method),
                    *(outcome_of(_runs(result, method, rate, size)).text for rate in self.learning_rates),
                ]
                for method in self.methods
            ]
            text += f"\nBatches of {size}:\n\n" + table(["", *(f"{rate:g}" for rate in self.learning_rates)], rows)
        if self.validation:
            text += f"\nChosen by the error on {self.validation:.0%} of the training set, held out:\n\n"
            text += self._chosen(result)
        return text

    def _chosen(self, result: dict[str, Any]) -> str:
        """Returns a table of the choices of the validation set, for each batch size."""
        rows = []
        for name in dict.fromkeys(method.partition(":")[0] for method in self.methods):
            for size in self.batch_sizes:
                of_name = [run for run in result["runs"] if run["method"].partition(":")[0] == name]
                choice = choice_of([run for run in of_name if run["batch_size"] == size])
                rows.append([name, *(choice.cells if choice else ["", "", "", "diverged", "", ""])])
        headings = ["", "batch", "settings", "rate", "validation error %", "lowest after epochs", "test error %"]
        return table(headings, rows)

    def draw(self, results: list[dict[str, Any]]) -> None:
        self._draw_curves(results[0])
        self._draw_by_rate(results[0])

    def _draw_curves(self, result: dict[str, Any]) -> None:
        """Draws the test error over the epochs, with a panel per learning rate and a row of panels per batch size."""
        rates, sizes = self.learning_rates, self.batch_sizes
        path, size = self.output / "pipeline.png", (4.5 * len(rates), 4.5 * len(sizes))
        looks: Any = looks_of(self.methods)
        legend: Any = {"legend": "below", "legend_columns": 1 + len(rates)}
        with picture(path, size, len(sizes), len(rates), sharey=True, **legend) as panels:
            for row, batch_size in zip(panels, sizes, strict=True):
                for panel, rate in zip(row, rates, strict=True):
                    title = f"learning rate {rate:g}, batches of {batch_size}"
                    for method in self.methods:
                        runs = _runs(result, method, rate, batch_size)
                        _draw_curve(panel, runs, readable(method), looks[method])
                        if num_diverged := outcome_of(runs).num_diverged:
                            title += f"\n{readable(method)}: {num_diverged} of {len(runs)} diverged"
                    panel.set(xlabel="epoch", yscale="log")
                    panel.set_title(title, fontsize="medium")
                    panel.grid(alpha=0.3, which="both")
                row[0].set_ylabel("test error %")

    def _draw_by_rate(self, result: dict[str, Any]) -> None:
        """Draws the final test error over the learning rate, a panel for each batch size; what diverged is left out."""
        sizes, path = self.batch_sizes, self.output / "pipeline_by_rate.png"
        columns, looks = min(2, len(sizes)), looks_of(self.methods)
        rows = -(-len(sizes) // columns)
        legend: Any = {"legend": "below", "legend_columns": 2 * columns}
        with picture(path, (6 * columns, 4.5 * rows), rows, columns, sharey=True, **legend) as panels:
            for panel in panels.flat[len(sizes) :]:
                panel.set_axis_off()
            for panel, size in zip(panels.flat, sizes, strict=False):
                for method in self.methods:
                    outcomes = {rate: outcome_of(_runs(result, method, rate, size)) for rate in self.learning_rates}
                    ends = {rate: outcome.error for rate, outcome in outcomes.items() if not outcome.num_diverged}
                    panel.plot([*ends], [*ends.values()], label=readable(method), **looks[method])
                panel.set(xlabel="learning rate", title=f"batches of {size}", xscale="log", yscale="log")
                panel.grid(alpha=0.3, which="both")
            for panel in panels[:, 0]:
                panel.set_ylabel("test error %")


@dataclass(frozen=True)
class Outcome:
    """The final error of the trainings with one method at one learning rate."""

    error: float | None  # the mean of the trainings that did not diverge, in %; None if all did
    interval: float | None  # half the 95 % confidence interval (Student's t); None for fewer than two trainings
    num_diverged: int  # trainings in which a loss was not finite
    num_runs: int

    @property
    def text(self) -> str:
        """The error, for a table."""
        if self.error is None:
            return "diverged"
        note = f" ({self.num_diverged} of {self.num_runs} diverged)" if self.num_diverged else ""
        return with_interval(self.error, self.interval) + note


def outcome_of(runs: Sequence[Run]) -> Outcome:
    """Returns the outcome of trainings with different seeds."""
    errors = [run["points"][-1]["error"] for run in runs if not run["diverged"]]
    return Outcome(fmean(errors) if errors else None, interval_of(errors), len(runs) - len(errors), len(runs))


@dataclass(frozen=True)
class Choice:
    """The settings of one method that the validation set chooses."""

    method: str
    learning_rate: float
    batch_size: int
    validation: float  # the mean error on the validation set, in %
    lowest_after: float  # the mean number of epochs until that error is at its lowest
    outcome: Outcome  # on the test set

    @property
    def cells(self) -> list[str]:
        """What a table has of it."""
        settings = self.method.partition(":")[2].replace(",", ", ")
        errors = [f"{self.validation:.2f}", f"{self.lowest_after:.0f}", self.outcome.text]
        return [f"{self.batch_size}", settings, f"{self.learning_rate:g}", *errors]


def choice_of(runs: Sequence[Run]) -> Choice | None:
    """Returns the settings with the lowest mean error on the validation set among those that never diverge."""
    by_settings: dict[tuple[str, float, int], list[Run]] = {}
    for run in runs:
        by_settings.setdefault((run["method"], run["learning_rate"], run["batch_size"]), []).append(run)
    choices = []
    for settings, of_settings in by_settings.items():
        if not any(run["diverged"] for run in of_settings):
            validation = fmean(run["points"][-1]["validation"] for run in of_settings)
            lowest = [min(run["points"], key=lambda point: point["validation"])["epoch"] for run in of_settings]
            choices.append(Choice(*settings, validation, fmean(lowest), outcome_of(of_settings)))
    return min(choices, key=lambda choice: choice.validation, default=None)


def _draw_curve(panel: Any, runs: list[Run], label: str, look: dict[str, Any]) -> None:
    """Draws the mean over the seeds and, lighter, the range, as far as none of them has diverged."""
    curves = list(zip(*(run["points"] for run in runs), strict=False))
    errors = [[point["error"] for point in points] for points in curves]
    epochs = [points[0]["epoch"] for points in curves]
    panel.plot(epochs, [*map(fmean, errors)], label=label, markersize=4, **look)
    panel.fill_between(epochs, [*map(min, errors)], [*map(max, errors)], color=look["color"], alpha=0.12, linewidth=0)


def _runs(result: dict[str, Any], method: str, learning_rate: float, batch_size: int) -> list[Run]:
    wanted = (method, learning_rate, batch_size)
    return [run for run in result["runs"] if (run["method"], run["learning_rate"], run["batch_size"]) == wanted]


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.pipeline:Pipeline"))
