"""``python -m benchmarks.ea_pipe_bound``: elastic averages on a quadratic beside EA-Pipe's Theorem 1."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.intervals import interval_of
from benchmarks.pipelines.vectorized import Elastic
from benchmarks.theory.elastic_averaging import error_bound, largest_rate, mixing_matrix, zeta
from benchmarks.theory.points import points_of
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.pictures import colour_and_line, picture
from lightning_pipesync.lab.bench.tables import environment, table

#: The number of points of a curve, evenly on a logarithmic scale.
NUM_POINTS = 13
#: The size of the quadratic, and its eigenvalues on a logarithmic scale, of which the largest is L.
SIZE, LEAST_EIGENVALUE, LIPSCHITZ = 16, 0.01, 1.0
#: F(y_0) - F_inf, and sigma squared.
GAP, VARIANCE = 1.0, 1.0
#: At which rate a training runs, by whether the proof covers it.
RATES = {True: "the largest rate that the proof allows", False: "the largest rate that the paper states"}


@dataclass(frozen=True, kw_only=True)
class EAPipeBound(Command):
    """Trains a quadratic with elastic averages, as EA-Pipe does: how far the gradient stays below Theorem 1.

    Attributes:
        stages: Values of N, the number of stages, which is that of replicas.
        forces: Values of alpha, the elastic force.
        periods: Values of tau, the synchronization period.
        growths: Values of beta: the variance of the gradient is 1 plus beta times its squared norm.
        rounds: K, the number of rounds of N mini-batches, which gives every smaller K, too.
        trainings: Number of trainings, which differ in their noise.
    """

    stages: tuple[int, ...] = (2, 4, 8)
    forces: tuple[float, ...] = (0.1, 0.5)
    periods: tuple[int, ...] = (1, 4)
    growths: tuple[float, ...] = (0.0, 1.0)
    rounds: int = 10_000
    trainings: int = 10

    name = "ea_pipe_bound"

    def __post_init__(self) -> None:
        for name in ("stages", "forces", "periods"):
            self._check_all_positive(name, getattr(self, name), "numbers")
        if any(force >= 1 for force in self.forces):
            raise ValueError(f"forces must be less than 1, got {self.forces!r}.")
        if not self.growths or any(growth < 0 for growth in self.growths):
            raise ValueError(f"growths must be one or more numbers, 0 or more, got {self.growths!r}.")
        self._check_positive("rounds", "trainings")

    def results(self) -> list[dict[str, Any]]:
        """Trains with each number of stages, and all other settings at once.

        Returns:
            Settings, environment, the numbers of ``rounds`` K, and ``curves``: for each setting its constants, the
            ``measured`` mean squared norm of the gradient at the mean of all models over K rounds, a mean over the
            trainings with half its confidence ``interval``, its ``bound``, and for the last K that at the ``master``.
        """
        ends, curves = points_of(self.rounds, NUM_POINTS), list[dict[str, Any]]()
        with progress_bar("", len(self.stages)) as advance:
            for num_stages in self.stages:
                settings = list(self._settings(num_stages))
                curves += measure(settings, self.trainings, ends)
                advance(f"{num_stages} stages")
        return [{"settings": self.settings(), "environment": environment(), "rounds": ends, "curves": curves}]

    def _settings(self, num_stages: int) -> Iterator[Setting]:
        for proved, growth, period, force in product(RATES, self.growths, self.periods, self.forces):
            yield Setting(num_stages, force, period, growth, proved)

    def report(self, results: list[dict[str, Any]]) -> str:
        """Returns a table for each kind of rate and each beta."""
        return "\n".join(
            _part(result, proved, growth)
            for result in results
            for proved in RATES
            for growth in result["settings"]["growths"]
        )

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws the measured curves and the bounds over K: a row of panels for each rate, of the first beta."""
        result = results[-1]
        stages, growth = result["settings"]["stages"], result["settings"]["growths"][0]
        size = (4.5 * len(stages), 4 * len(RATES))
        shared: dict[str, Any] = {"sharey": True, "legend": "below", "legend_columns": 4}
        with picture(self.output / "ea_pipe_bound.png", size, len(RATES), len(stages), **shared) as panels:
            for row, proved in zip(panels, RATES, strict=True):
                for panel, num_stages in zip(row, stages, strict=True):
                    shown = _curves(result, proved, growth, num_stages)
                    for number, curve in enumerate(shown):
                        color = colour_and_line(number)["color"]
                        name = f"alpha = {curve['force']:g}, tau = {curve['period']}"
                        panel.plot(result["rounds"], curve["measured"], color=color, label=f"{name}, measured")
                        panel.plot(result["rounds"], curve["bound"], "--", color=color, label=f"{name}, bound")
                    panel.set(xscale="log", yscale="log", xlabel="rounds K")
                    panel.set_title(f"{num_stages} stages, {RATES[proved]}", fontsize="small")
                    panel.grid(alpha=0.3)
                row[0].set_ylabel("mean squared gradient")


@dataclass(frozen=True)
class Setting:
    """What a training has; the attributes are those of :func:`~.elastic_averaging.error_bound`."""

    num_stages: int
    force: float
    period: int
    growth: float
    proved: bool  #: whether its rate is the largest that the proof allows; otherwise that which the paper states

    @property
    def rate(self) -> float:
        """The learning rate eta."""
        return largest_rate(
            num_replicas=self.num_stages,
            elastic_force=self.force,
            period=self.period,
            lipschitz=LIPSCHITZ,
            variance_growth=self.growth,
            proved=self.proved,
        )

    def bound(self, num_iterations: int) -> float:
        """Returns the right side of Theorem 1 for K iterations."""
        return error_bound(
            num_replicas=self.num_stages,
            elastic_force=self.force,
            period=self.period,
            learning_rate=self.rate,
            lipschitz=LIPSCHITZ,
            variance=VARIANCE,
            initial_gap=GAP,
            num_iterations=num_iterations,
            variance_growth=self.growth,
        )


class Quadratic:
    """The sum of the squared weights times their eigenvalues over 2, with noise in its gradient.

    The variance of the gradient is :data:`VARIANCE` plus beta times its squared norm: Assumption 4 without slack.

    Args:
        growths: beta of each model, shape ``[models, 1]``.
    """

    def __init__(self, growths: Tensor) -> None:
        self.eigenvalues = LIPSCHITZ * torch.logspace(0, 1, SIZE, base=LEAST_EIGENVALUE, dtype=torch.float64)
        self._growths = growths

    def gradient(self, seen: Tensor, used: Tensor, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Computes the gradient into ``out``; ``x`` has normal random numbers. All are of shape ``[models, SIZE]``."""
        torch.mul(seen, self.eigenvalues, out=out)
        variance = self._growths * out.square().sum(dim=1, keepdim=True) + VARIANCE
        out += (variance / SIZE).sqrt() * x

    def initial(self) -> Tensor:
        """Returns weights with the value :data:`GAP`, equally much in each direction."""
        return (2 * GAP / SIZE / self.eigenvalues).sqrt()


def measure(settings: Sequence[Setting], num_trainings: int, ends: list[int]) -> list[dict[str, Any]]:
    """Trains with all settings at once, of one number of stages, on the same noise; returns a curve of each."""

    def per_training(values: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(num_trainings).unsqueeze(1)

    num_stages, generator = settings[0].num_stages, torch.Generator().manual_seed(0)
    model = Quadratic(per_training([one.growth for one in settings]).repeat(num_stages, 1))
    initial = model.initial().repeat(len(settings) * num_trainings, 1)
    training: Elastic[Quadratic] = Elastic(
        *(model, initial, per_training([one.rate for one in settings]), 0.0, 0.0),
        num_replicas=num_stages,
        elastic_forces=per_training([one.force for one in settings]),
        sync_periods=per_training([one.period for one in settings], torch.int64),
    )
    labels = torch.empty(num_stages, len(initial), 0)
    totals, means = torch.zeros(2, len(initial), dtype=torch.float64), []
    for k in range(1, ends[-1] + 1):
        mean = (training.replicas.sum(dim=0) + training.master) / (num_stages + 1)  # y_k
        totals += (torch.stack([mean, training.master]) * model.eigenvalues).square().sum(dim=2)
        noise = torch.randn(num_stages, num_trainings, SIZE, generator=generator, dtype=torch.float64)
        training.step(noise.repeat(1, len(settings), 1), labels)
        if k in ends:
            means.append((totals / k).unflatten(1, (len(settings), num_trainings)))
    at_mean, at_master = torch.stack(means, dim=2).unbind()  # [settings, points, trainings]
    return [
        {
            "stages": num_stages,
            "force": one.force,
            "period": one.period,
            "growth": one.growth,
            "proved": one.proved,
            "rate": one.rate,
            "zeta": zeta(mixing_matrix(num_stages, one.force)),
            "measured": [fmean(values) for values in of_setting.tolist()],
            "interval": interval_of(of_setting[-1].tolist()),
            "bound": [one.bound(k) for k in ends],
            "master": float(of_master[-1].mean()),
        }
        for one, of_setting, of_master in zip(settings, at_mean, at_master, strict=True)
    ]


def factors_of(curve: dict[str, Any]) -> list[float]:
    """Returns by what factor a curve is below its bound, at each K; below 1 it is above."""
    return [bound / value for bound, value in zip(curve["bound"], curve["measured"], strict=True)]


def _curves(result: dict[str, Any], proved: bool, growth: float, num_stages: int | None = None) -> list[dict[str, Any]]:
    return [
        curve
        for curve in result["curves"]
        if (curve["proved"], curve["growth"]) == (proved, growth) and num_stages in (None, curve["stages"])
    ]


def _part(result: dict[str, Any], proved: bool, growth: float) -> str:
    curves, last = _curves(result, proved, growth), result["rounds"][-1]
    factors = [factors_of(curve) for curve in curves]
    num_above = sum(min(of_curve) < 1 for of_curve in factors)
    every = [factor for of_curve in factors for factor in of_curve]
    if num_above:
        outcome = f"above the bound in {num_above} of {len(curves)} settings, by a factor of up to {1 / min(every):.2f}"
    else:
        outcome = f"below the bound for every setting and K, by a factor of {min(every):.1f} to {max(every):.0f}"
    rows = [
        [
            f"{curve['stages']}",
            f"{curve['force']:g}",
            f"{curve['period']}",
            f"{curve['zeta']:.3f}",
            f"{curve['rate']:.2g}",
            f"{curve['measured'][-1]:.2g}" + ("" if curve["interval"] is None else f" ± {curve['interval']:.1g}"),
            f"{curve['bound'][-1]:.2g}",
            f"{of_curve[-1]:.1f}",
            f"{curve['master']:.2g}",
        ]
        for curve, of_curve in zip(curves, factors, strict=True)
    ]
    headings = ["N", "alpha", "tau", "zeta", "eta", "measured", "bound", "factor", "at the master"]
    return f"""### beta = {growth:g}, {RATES[proved]}

L = {LIPSCHITZ:g}, sigma² = {VARIANCE:g}, F(y_0) - F_inf = {GAP:g}. The mean squared gradient over K rounds, at the
mean of all models, is {outcome}. At K = {last}:

{table(headings, rows)}"""


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.ea_pipe_bound:EAPipeBound"))
