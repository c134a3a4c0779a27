"""Table and training curves of pipelines (EA-Pipe, Tables 1, 4 and 7, Figs. 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t

from lightning_pipesync.bench.named_settings import readable
from lightning_pipesync.bench.results import table

Run = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What the trainings with one method at one learning rate ended with.

    Attributes:
        error: of the trainings that did not diverge, the mean in %; None if all did.
        interval: half the 95 % confidence interval of the error (Student's t); None for fewer than two trainings.
        num_diverged: trainings in which a loss was not finite.
        num_runs: trainings.
    """

    error: float | None
    interval: float | None
    num_diverged: int
    num_runs: int


def outcome_of(runs: list[Run]) -> Outcome:
    """Returns what trainings with different seeds ended with."""
    errors = [run["points"][-1]["error"] for run in runs if not run["diverged"]]
    interval = None
    if len(errors) > 1:
        interval = float(t.ppf(0.975, len(errors) - 1)) * stdev(errors) / len(errors) ** 0.5
    return Outcome(fmean(errors) if errors else None, interval, len(runs) - len(errors), len(runs))


def as_markdown(result: dict[str, Any]) -> str:
    """Returns a table: methods by learning rates."""
    settings = result["settings"]
    rates = settings["learning_rates"]
    count = len(settings["seeds"])
    shown = f"mean of {count} trainings ± 95 % confidence interval" if count > 1 else "one training"
    text = f"""### {settings["model"]} on {settings["task"]}, {settings["stages"]} stages

Test error in % after {settings["epochs"]} epochs, {settings["batch_size"]} samples a mini-batch, momentum
{settings["momentum"]:g}, by learning rate: {shown}. Diverged: a loss was not finite.

"""
    rows = [
        [readable(method), *(_cell(outcome_of(_runs(result, method, rate))) for rate in rates)]
        for method in settings["methods"]
    ]
    return text + table(["", *(f"{rate:g}" for rate in rates)], rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the test error over the epochs, a panel for each learning rate."""
    settings = result["settings"]
    rates = settings["learning_rates"]
    figure = Figure(figsize=(4.5 * len(rates), 4.5), layout="constrained")
    [panels] = figure.subplots(1, len(rates), squeeze=False, sharey=True)
    for panel, rate in zip(panels, rates, strict=True):
        for method in settings["methods"]:
            _draw_curve(panel, _runs(result, method, rate), readable(method))
        panel.set(xlabel="epoch", title=f"learning rate {rate:g}", yscale="log")
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


def _runs(result: dict[str, Any], method: str, learning_rate: float) -> list[Run]:
    return [run for run in result["runs"] if (run["method"], run["learning_rate"]) == (method, learning_rate)]


def _cell(outcome: Outcome) -> str:
    if outcome.error is None:
        return "diverged"
    interval = "" if outcome.interval is None else f" ± {outcome.interval:.2f}"
    note = f" ({outcome.num_diverged} of {outcome.num_runs} diverged)" if outcome.num_diverged else ""
    return f"{outcome.error:.2f}{interval}{note}"
