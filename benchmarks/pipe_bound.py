"""``python -m benchmarks.pipe_bound``: trainings with delayed gradients beside Pipe-SGD's convergence bounds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.intervals import interval_of
from benchmarks.theory.convex import PROBLEMS, LinearModel
from benchmarks.theory.pipe_cost import convergence_bound, first_step_size, strongly_convex_bound
from benchmarks.theory.points import points_of
from lightning_pipesync.lab.bench.benchmark import Command, Progress, progress_bar
from lightning_pipesync.lab.bench.pictures import colour_and_line, picture
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.methods.pipe_sgd.algorithm import Pipeline

#: The number of points of a curve, evenly on a logarithmic scale.
NUM_POINTS = 25

#: The gradients in flight, each with the number of updates before it was computed.
Gradients = Pipeline[tuple[Tensor, int]]


@dataclass(frozen=True, kw_only=True)
class PipeBound(Command):
    """Trains convex problems with gradients that are k steps late: how far it stays below the theory's bounds.

    Attributes:
        problems: absolute (|w - 1/pi|) and logistic (regression on digits), which are convex; mean (of a random number)
            and logistic-l2, which are strongly convex.
        staleness: Values of k, the number of steps by which a gradient is late.
        steps: T, the number of steps of a training, which gives every smaller T, too.
        trainings: Number of trainings, which differ in their samples and first weights.
    """

    problems: tuple[str, ...] = tuple(PROBLEMS)
    staleness: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = 10_000
    trainings: int = 20

    name = "pipe_bound"

    def __post_init__(self) -> None:
        for problem in self.problems:
            if problem not in PROBLEMS:
                raise ValueError(f"problems: {problem!r} is not known; there are {', '.join(PROBLEMS)}.")
        if not self.staleness or any(k < 0 for k in self.staleness):
            raise ValueError(f"staleness must be one or more numbers of steps, 0 or more, got {self.staleness!r}.")
        self._check_positive("steps", "trainings")

    def results(self) -> list[dict[str, Any]]:
        """Trains each problem with each staleness.

        Returns:
            Settings, environment, and for each problem its constants and, for each staleness and each T, the
            ``measured`` distance of the mean objective from the optimum, a mean over the trainings with half its
            confidence ``interval``, and its ``bound``.
        """
        found = []
        with progress_bar("", len(self.problems)) as advance:
            for name in self.problems:
                found.append(self._measure(name, advance))
        return [{"settings": self.settings(), "environment": environment(), "problems": found}]

    def _measure(self, name: str, advance: Progress) -> dict[str, Any]:
        problem = PROBLEMS[name]()
        ends = points_of(self.steps, NUM_POINTS)
        means = train(problem, self.staleness, self.trainings, ends)
        curves = []
        for k, of_staleness in zip(self.staleness, means, strict=True):
            curves.append(
                {
                    "staleness": k,
                    "measured": [fmean(values) for values in of_staleness.tolist()],
                    "interval": [interval_of(values) for values in of_staleness.tolist()],
                    "bound": [bound_of(problem, k)(end) for end in ends],
                }
            )
        advance(problem.title)
        return {
            "title": problem.title,
            "radius": problem.distance,
            "lipschitz": problem.lipschitz,
            "strong_convexity": problem.strong_convexity,
            "steps": ends,
            "curves": curves,
        }

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(_part(problem) for result in results for problem in result["problems"])

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws the measured curves and the bounds over T, a panel for each problem."""
        problems = results[-1]["problems"]
        columns = min(2, len(problems))
        rows = -(-len(problems) // columns)
        size = (5.5 * columns, 4 * rows)
        with picture(self.output / "pipe_bound.png", size, rows, columns, legend="below", legend_columns=4) as panels:
            for panel in panels.flat[len(problems) :]:
                panel.set_axis_off()
            for panel, problem in zip(panels.flat, problems, strict=False):
                for number, curve in enumerate(problem["curves"]):
                    color, k = colour_and_line(number)["color"], curve["staleness"]
                    panel.plot(problem["steps"], curve["measured"], color=color, label=f"k = {k}, measured")
                    panel.plot(problem["steps"], curve["bound"], "--", color=color, label=f"k = {k}, bound")
                panel.set(xscale="log", yscale="log", xlabel="steps T", title=problem["title"])
                panel.set_ylabel("mean objective - optimum")
                panel.grid(alpha=0.3)


def bound_of(problem: LinearModel, staleness: int) -> Callable[[int], float]:
    """Returns the bound of a problem as a function of T."""
    if problem.strong_convexity:
        mu = problem.strong_convexity
        return lambda steps: strongly_convex_bound(steps, staleness, mu, problem.distance, problem.lipschitz)
    return lambda steps: convergence_bound(steps, staleness, problem.distance, problem.lipschitz)


def step_size_of(problem: LinearModel, staleness: int) -> Callable[[int], float]:
    """Returns the step size of the bound's theorem, as a function of the number of the update, from 1."""
    if problem.strong_convexity:
        return lambda update: 1 / (problem.strong_convexity * update)
    first = first_step_size(staleness, problem.distance, problem.lipschitz)
    return lambda update: first / math.sqrt(update)


def train(problem: LinearModel, staleness: tuple[int, ...], num_trainings: int, ends: list[int]) -> Tensor:
    """Trains many times with each staleness, on the same samples, one a step (Algorithm 1 of one worker).

    Returns:
        The mean over the first T steps of the distance of the objective from the optimum, for each T of ``ends``; shape
        ``[len(staleness), len(ends), num_trainings]``, fp64.
    """
    generator = torch.Generator().manual_seed(0)
    optimum = problem.optimum()
    size = problem.inputs.shape[1]
    start = torch.randn(num_trainings, size, generator=generator, dtype=torch.float64)
    start *= problem.radius / start.norm(dim=1, keepdim=True)
    weights = start.repeat(len(staleness), 1, 1)
    pipelines = [Gradients(k, warmup_steps=0) for k in staleness]
    step_sizes = [step_size_of(problem, k) for k in staleness]
    total, means = torch.zeros(len(staleness), num_trainings, dtype=torch.float64), []
    for step in range(1, ends[-1] + 1):
        samples = torch.randint(len(problem.inputs), (num_trainings,), generator=generator)
        total += problem.value(weights) - optimum
        gradients = problem.gradient(weights, samples)
        for own, gradient, pipeline, step_size in zip(weights, gradients, pipelines, step_sizes, strict=True):
            pipeline.submit((gradient, pipeline.num_updates))
            if pipeline.due is not None:
                late, num_updates = pipeline.retire()
                pipeline.count_update(num_updates)
                own.copy_(problem.project(own - step_size(pipeline.num_updates) * late))
            pipeline.end_step()
        if step in ends:
            means.append(total / step)
    return torch.stack(means, dim=1)


def slope_of(steps: list[int], values: list[float]) -> float:
    """Returns the slope of a curve on logarithmic scales over its last decade of steps."""
    last = [(math.log(t), math.log(value)) for t, value in zip(steps, values, strict=True) if 10 * t >= steps[-1]]
    x, y = zip(*last, strict=True)
    mean_x, mean_y = fmean(x), fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in last) / sum((a - mean_x) ** 2 for a in x)


def _part(problem: dict[str, Any]) -> str:
    mu, steps, curves = problem["strong_convexity"], problem["steps"], problem["curves"]
    factors = {curve["staleness"]: factors_of(curve) for curve in curves}
    first = curves[0]
    rows = [
        [
            f"{curve['staleness']}",
            _with_interval(curve["measured"][-1], curve["interval"][-1]),
            f"{curve['bound'][-1]:.3g}",
            f"{factors[curve['staleness']][-1]:.1f}",
            f"{min(factors[curve['staleness']]):.1f}",
            f"{curve['measured'][-1] / first['measured'][-1]:.2f} ({curve['bound'][-1] / first['bound'][-1]:.2f})",
            f"{slope_of(steps, curve['measured']):.2f} ({slope_of(steps, curve['bound']):.2f})",
        ]
        for curve in curves
    ]
    kind = f"strongly convex, mu = {mu:g}" if mu else "convex"
    every = [factor for of_curve in factors.values() for factor in of_curve]
    above = [k for k, of_curve in factors.items() if min(of_curve) < 1]
    outcome = (
        f"above the bound with k = {', '.join(map(str, above))}"
        if above
        else f"below the bound for every k and T, by a factor of {min(every):.1f} to {max(every):.1f}"
    )
    return f"""### {problem["title"]}: {kind}

F = {problem["radius"]:.3g}, L = {problem["lipschitz"]:.3g}. The measured mean of the objective over T steps, less the
optimum, is {outcome}. At T = {steps[-1]}, with the least factor of
any T; the slope is that on logarithmic scales over the last decade of T. In brackets what the bound says:

{table(["k", "measured", "bound", "factor", "least factor", f"over k = {first['staleness']}", "slope"], rows)}"""


def _with_interval(value: float, interval: float | None) -> str:
    return f"{value:.3g}" if interval is None else f"{value:.3g} ± {interval:.1g}"


def factors_of(curve: dict[str, Any]) -> list[float]:
    """Returns by what factor a curve is below its bound, at each T; below 1 it is above."""
    return [bound / max(value, 1e-300) for bound, value in zip(curve["bound"], curve["measured"], strict=True)]


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.pipe_bound:PipeBound"))
