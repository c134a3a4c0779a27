"""The report of a study of pipelines: tables and training curves (EA-Pipe, Tables 1 to 7, Figs. 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.pictures import Picture
from lightning_pipesync.lab.bench.tables import interval_of, table

Run = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The final error of the trainings with one method at one learning rate.

    Attributes:
        error: the mean error of the trainings that did not diverge, in %; None if all did.
        interval: half the 95 % confidence interval of the error (Student's t); None for fewer than two trainings.
        num_diverged: the number of trainings in which a loss was not finite.
        num_runs: the number of trainings.
    """

    error: float | None
    interval: float | None
    num_diverged: int
    num_runs: int


def outcome_of(runs: list[Run]) -> Outcome:
    """Returns the outcome of trainings with different seeds."""
    errors = [run["points"][-1]["error"] for run in runs if not run["diverged"]]
    return Outcome(fmean(errors) if errors else None, interval_of(errors), len(runs) - len(errors), len(runs))


@dataclass(frozen=True)
class Choice:
    """The settings of one method that the validation set chooses.

    Attributes:
        method: the method with its settings.
        learning_rate: the initial learning rate.
        batch_size: samples of a mini-batch.
        validation: the mean error on the validation set, in %.
        lowest_after: the mean number of epochs until the error on the validation set is at its lowest.
        outcome: the errors on the test set.
    """

    method: str
    learning_rate: float
    batch_size: int
    validation: float
    lowest_after: float
    outcome: Outcome


def choice_of(runs: list[Run]) -> Choice | None:
    """Returns the settings with the lowest mean error on the validation set among those that never diverge."""
    choices = []
    for method, rate, size in dict.fromkeys((run["method"], run["learning_rate"], run["batch_size"]) for run in runs):
        own = _runs(runs, method, rate, size)
        if not any(run["diverged"] for run in own):
            validation = fmean(run["points"][-1]["validation"] for run in own)
            lowest = [min(run["points"], key=lambda point: point["validation"])["epoch"] for run in own]
            choices.append(Choice(method, rate, size, validation, fmean(lowest), outcome_of(own)))
    return min(choices, key=lambda choice: choice.validation, default=None)


def as_markdown(result: dict[str, Any]) -> str:
    """Returns tables of methods by learning rates, for each batch size, and of the choices of the validation set."""
    settings = result["settings"]
    rates = settings["learning_rates"]
    count = len(settings["seeds"])
    shown = f"mean of {count} trainings ± 95 % confidence interval" if count > 1 else "one training"
    text = f"""### {settings["model"]} on {settings["task"]}, {settings["stages"]} stages

Test error in % after {settings["epochs"]} epochs, momentum {settings["momentum"]:g}, by learning rate: {shown}.
Diverged: a loss or a weight was not finite.
"""
    for size in settings["batch_sizes"]:
        rows = [
            [readable(method), *(_cell(outcome_of(_runs(result["runs"], method, rate, size))) for rate in rates)]
            for method in settings["methods"]
        ]
        text += f"\nBatches of {size}:\n\n" + table(["", *(f"{rate:g}" for rate in rates)], rows)
    if settings["validation"]:
        text += f"\nChosen by the error on {settings['validation']:.0%} of the training set, held out:\n\n"
        text += _chosen(result)
    return text


def _chosen(result: dict[str, Any]) -> str:
    """Returns a table of the choices of the validation set, for each batch size."""
    sizes = result["settings"]["batch_sizes"]
    rows = []
    for name in dict.fromkeys(_name_of(method) for method in result["settings"]["methods"]):
        runs = [run for run in result["runs"] if _name_of(run["method"]) == name]
        for choice in [choice_of([run for run in runs if run["batch_size"] == size]) for size in sizes]:
            if choice is None:
                rows.append([name, "", "", "", "diverged", "", ""])
                continue
            chosen = [
                f"{choice.batch_size}",
                choice.method.partition(":")[2].replace(",", ", "),
                f"{choice.learning_rate:g}",
            ]
            errors = [f"{choice.validation:.2f}", f"{choice.lowest_after:.0f}", _cell(choice.outcome)]
            rows.append([name, *chosen, *errors])
    return table(["", "batch", "settings", "rate", "validation error %", "lowest after epochs", "test error %"], rows)


def _name_of(method: str) -> str:
    return method.partition(":")[0]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the test error over the epochs, with a panel per learning rate and a row of panels per batch size."""
    settings = result["settings"]
    rates, sizes = settings["learning_rates"], settings["batch_sizes"]
    figure = Picture(figsize=(4.5 * len(rates), 4.5 * len(sizes)), layout="constrained")
    for size, panels in zip(sizes, figure.subplots(len(sizes), len(rates), squeeze=False, sharey=True), strict=True):
        for panel, rate in zip(panels, rates, strict=True):
            for method in settings["methods"]:
                _draw_curve(panel, _runs(result["runs"], method, rate, size), readable(method))
            panel.set(xlabel="epoch", title=f"learning rate {rate:g}, batches of {size}", yscale="log")
            panel.grid(alpha=0.3, which="both")
        panels[0].set_ylabel("test error %")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def draw_by_rate(result: dict[str, Any], path: Path) -> None:
    """Draws the final test error over the learning rate, a panel for each batch size; what diverged is left out."""
    settings = result["settings"]
    sizes = settings["batch_sizes"]
    figure = Picture(figsize=(6 * len(sizes), 4.5), layout="constrained")
    [panels] = figure.subplots(1, len(sizes), squeeze=False, sharey=True)
    for panel, size in zip(panels, sizes, strict=True):
        for method in settings["methods"]:
            outcomes = [outcome_of(_runs(result["runs"], method, rate, size)) for rate in settings["learning_rates"]]
            ends = [
                (r, o.error) for r, o in zip(settings["learning_rates"], outcomes, strict=True) if not o.num_diverged
            ]
            style = "o-" if _name_of(method) == "ea_pipe" else "s--"
            panel.plot([rate for rate, _ in ends], [error for _, error in ends], style, label=readable(method))
        panel.set(xlabel="learning rate", title=f"batches of {size}", xscale="log", yscale="log")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("test error %")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_curve(panel: Axes, runs: list[Run], label: str) -> None:
    """Draws the mean over the seeds and, lighter, the range, as far as none of them has diverged."""
    epochs, means, lowest, highest = [], [], [], []
    for points in zip(*(run["points"] for run in runs), strict=False):
        errors = [point["error"] for point in points]
        epochs.append(points[0]["epoch"])
        means.append(fmean(errors))
        lowest.append(min(errors))
        highest.append(max(errors))
    num_diverged = sum(run["diverged"] for run in runs)
    note = f" ({num_diverged} of {len(runs)} diverged)" if num_diverged else ""
    [line] = panel.plot(epochs, means, label=label + note)
    panel.fill_between(epochs, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)


def _runs(runs: list[Run], method: str, learning_rate: float, batch_size: int) -> list[Run]:
    wanted = (method, learning_rate, batch_size)
    return [run for run in runs if (run["method"], run["learning_rate"], run["batch_size"]) == wanted]


def _cell(outcome: Outcome) -> str:
    if outcome.error is None:
        return "diverged"
    interval = "" if outcome.interval is None else f" ± {outcome.interval:.2f}"
    note = f" ({outcome.num_diverged} of {outcome.num_runs} diverged)" if outcome.num_diverged else ""
    return f"{outcome.error:.2f}{interval}{note}"
