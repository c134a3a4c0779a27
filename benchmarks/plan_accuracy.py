"""``python -m benchmarks.plan_accuracy``: how far plans are off, and the recommended method beside all others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist

import benchmarks.baselines  # noqa: F401 - adds its networks to the models
from benchmarks import command
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.models import EMULATED, TABLES
from lightning_pipesync.lab.bench.pictures import markers_of, picture
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.lab.plan.measure import plan_for
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.predictions import considered, predict
from lightning_pipesync.lab.plan.saved import of_result
from lightning_pipesync.lab.plan.trials import run_in_turns, to_prove
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import measure_work

#: What a plan considers, at most: with some models there are fewer bucket sizes and methods.
MOST_CANDIDATES = 32
#: The shares of a step that the picture shades.
SHADED = (0.04, 0.12)


@dataclass(frozen=True, kw_only=True)
class PlanAccuracy(Benchmark):
    """Makes a plan for each number of hosts, and runs all that it predicts, the exact methods with all bucket sizes.

    Attributes:
        model: emulated-alexnet, emulated-resnet50, emulated-densenet201, emulated-inceptionv4, emulated-bert-base or
            emulated-bert-large, with tensors of the size that has the ratio.
        ratio: Communication time over computation time, at the measured bandwidth.
        compute_ms: Forward and backward pass, in milliseconds.
        steps: Least number of steps of one measurement.
        rounds: Number of measurements of each method, in turns.
    """

    model: str = "emulated-resnet50"
    ratio: float = 1.0
    compute_ms: float = 150.0
    steps: int = 3
    rounds: int = 3

    name = "plan_accuracy"

    def __post_init__(self) -> None:
        names = [EMULATED + name for name in TABLES]
        if self.model not in names:
            raise ValueError(f"model={self.model!r} has no size that can be chosen; there are {', '.join(names)}.")
        self._check_positive("ratio", "compute_ms", "steps", "rounds")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return 1 + (self.rounds + 1) * MOST_CANDIDATES

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Plans, and runs all methods, the exact ones with all settings that were considered; a collective call.

        Returns:
            What :func:`plan_for` does, with ``measured``; of the first :func:`considered` ``predicted``: by name
            method, seconds, and whether the plan shows it; and ``recommended``, the name of the exact method.
        """
        planned = self._scaled_to(measure_bandwidth(), dist.get_world_size())
        model = planned.build()
        result = plan_for(measure_work(model), model.module, asdict(planned), progress)
        work, cluster, _ = of_result(result)
        shown, all_ = predict(work, cluster), considered(work, cluster)
        names = {one.name for one in shown}
        measured = run_in_turns(all_, planned, progress)
        run = to_prove(shown, lambda one: "seconds" in measured[one.name])
        return {
            **result,
            "measured": measured,
            "predicted": {
                one.name: {"method": one.title, "seconds": one.seconds, "exact": one.exact, "shown": one.name in names}
                for one in all_
            },
            "recommended": (verdict_of(run, measured).exact or run[0]).name,
        }

    def _scaled_to(self, bandwidth: float, world_size: int) -> PlanSettings:
        """Returns what is planned, with tensors of the size that has the ratio, or of their true size."""
        num_bytes = self.ratio * self.compute_ms / 1e3 * bandwidth * world_size / (2 * (world_size - 1))
        scale = min(1.0, num_bytes / (4 * TABLES[self.model.removeprefix(EMULATED)]().numel))
        return PlanSettings(self.model, scale, self.compute_ms, self.steps, self.rounds)

    def report(self, results: list[dict[str, Any]]) -> str:
        """Returns the errors by method, a row a plan, and the errors for more hosts than were measured."""
        of_plans = [outcomes(result) for result in results]
        everything = [one for of_plan in of_plans for one in of_plan.values()]
        methods = list(dict.fromkeys(one.method for one in everything))
        plans = [_row(result, of_plan, methods) for result, of_plan in zip(results, of_plans, strict=True)]
        columns = ["model", "hosts", "rate", "MiB", "compute ms", *methods, "recommended", "over DDP", "over the best"]
        text = _summary_table("off by", everything) + "\n" + table(columns, plans)
        if more := extrapolated(results):
            text += "\n" + _summary_table("more hosts, off by", more)
        return text

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws what was predicted over what was measured, with the shares that are :data:`SHADED`."""
        everything = [one for result in results for one in outcomes(result).values() if one.shown]
        with picture(self.output / "plan_accuracy.png", (6.5, 6), legend="panel") as [[panel]]:
            for method, look in markers_of(one.method for one in everything).items():
                points = [(1e3 * one.measured, 1e3 * one.predicted) for one in everything if one.method == method]
                panel.plot(*zip(*points, strict=True), label=method, **look, markersize=4, alpha=0.7)
            ends = [1e3 * limit(one.measured for one in everything) for limit in (min, max)]
            panel.plot(ends, ends, color="black", linewidth=0.8)
            for share in SHADED:
                low, high = ([(1 + sign * share) * end for end in ends] for sign in (-1, 1))
                panel.fill_between(ends, low, high, color="gray", alpha=0.15, linewidth=0, label=f"{share:.0%} off")
            panel.set(xscale="log", yscale="log", xlabel="measured, ms a step", ylabel="predicted, ms a step")
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("{x:g}")
            panel.grid(alpha=0.3)


@dataclass(frozen=True)
class Outcome:
    """A prediction and what was measured.

    Attributes:
        method: the strategy's name, with its variant.
        exact: whether it trains what DDP does.
        shown: whether the plan shows it; otherwise it is one of the settings that were considered.
        predicted: seconds of a step.
        measured: seconds of a step, the median of the rounds.
    """

    method: str
    exact: bool
    shown: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """What was predicted too much, as a share of what was measured."""
        return self.predicted / self.measured - 1


def outcomes(result: Mapping[str, Any]) -> dict[str, Outcome]:
    """Returns the outcomes of a result by name, of what could be run."""
    return {
        name: Outcome(one["method"], one["exact"], one["shown"], one["seconds"], median(measured["seconds"]))
        for name, one in result["predicted"].items()
        if "seconds" in (measured := result["measured"][name])
    }


def extrapolated(results: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Returns what the costs that were measured on the fewest hosts predict for more hosts with links of that rate."""
    fewest, *others = sorted(results, key=lambda result: int(result["world_size"]))
    found = []
    for result in others:
        cluster, work = of_result(fewest)[1].with_hosts(result["world_size"]), of_result(result)[0]
        seconds = {one.name: one.seconds for one in considered(work, cluster)}
        run = outcomes(result)
        found += [replace(run[name], predicted=took) for name, took in seconds.items() if name in run]
    return found


def _summary_table(title: str, found: Sequence[Outcome]) -> str:
    by_method = {name: [one for one in found if one.method == name] for name in dict.fromkeys(o.method for o in found)}
    headings = [title, "plans' rows", "median", "worst", "all settings", "median", "worst"]
    return table(headings, [_summary(name, some) for name, some in [*by_method.items(), ("all", found)]])


def _summary(method: str, found: Sequence[Outcome]) -> list[str]:
    cells = [method]
    for some in ([one for one in found if one.shown], found):
        errors = [abs(one.error) for one in some]
        cells += [str(len(errors)), f"{median(errors):.1%}", f"{max(errors):.0%}"] if errors else ["0", "", ""]
    return cells


def _row(result: Mapping[str, Any], of_plan: Mapping[str, Outcome], methods: Sequence[str]) -> list[str]:
    """Returns the errors of the rows of a plan by method, and what is recommended beside the best exact methods."""
    profile = result["work"]["profile"]
    shown = [one for one in of_plan.values() if one.shown]
    errors = [", ".join(f"{one.error:+.0%}" for one in shown if one.method == method) for method in methods]
    exact = {name: one for name, one in of_plan.items() if one.exact}
    ddp = min(one.measured for one in exact.values() if one.method == "ddp")
    best = min(one.measured for one in exact.values())
    recommended = exact[result["recommended"]]
    return [
        result["settings"]["model"].removeprefix("emulated-"),
        str(result["world_size"]),
        result["rate"] or "",
        f"{sum(tensor['num_bytes'] for tensor in profile['tensors']) / MIB:.2g}",
        f"{1e3 * (profile['forward'] + profile['backward']):.0f}",
        *errors,
        recommended.method,
        f"{recommended.measured / ddp - 1:+.1%}",
        f"{recommended.measured / best - 1:+.1%}",
    ]


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.plan_accuracy:PlanAccuracy"))
