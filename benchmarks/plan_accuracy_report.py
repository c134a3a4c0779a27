"""How far plans are off, as tables and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cluster import Cluster
from lightning_pipesync.core.work import Work
from lightning_pipesync.lab.bench.pictures import markers_of, picture
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.lab.plan.predictions import considered

#: The shares of a step that the picture shades.
SHADED = (0.04, 0.12)


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
    """Returns the outcomes of a result of :func:`measure_accuracy` by name, of what could be run."""
    return {
        name: Outcome(one["method"], one["exact"], one["shown"], one["seconds"], median(measured["seconds"]))
        for name, one in result["predicted"].items()
        if "seconds" in (measured := result["measured"][name])
    }


def over_ddp(result: Mapping[str, Any], method: str) -> float:
    """Returns how many times as fast as DDP a method is, both at the best of the settings that could be run."""
    of_plan = outcomes(result).values()
    ours, ddp = (min(one.measured for one in of_plan if one.method == name) for name in (method, "ddp"))
    return ddp / ours


def extrapolated(results: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Returns what the costs that were measured on the fewest hosts predict for more hosts with links of that rate."""
    fewest = min((result["world_size"] for result in results), default=0)
    few = sorted((result for result in results if result["world_size"] == fewest), key=_num_bytes)
    measured_at = {result["rate"]: result for result in few}  # of the model with the largest gradients
    found = []
    for result in results:
        if result["world_size"] == fewest or result["rate"] not in measured_at:
            continue
        cluster = Cluster.from_dict(measured_at[result["rate"]]["cluster"]).with_hosts(result["world_size"])
        seconds = {one.name: one.seconds for one in considered(Work.from_dict(result["work"]), cluster)}
        run = outcomes(result)
        found += [replace(run[name], predicted=took) for name, took in seconds.items() if name in run]
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the results in a file; none if there is no file."""
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.exists() else []
    return results


def as_markdown(results: Sequence[Mapping[str, Any]]) -> str:
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


def draw(results: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws what was predicted over what was measured, with the shares that are :data:`SHADED`."""
    everything = [one for result in results for one in outcomes(result).values() if one.shown]
    with picture(path, (6.5, 6), legend="panel") as [[panel]]:
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


def _num_bytes(result: Mapping[str, Any]) -> int:
    return sum(tensor["num_bytes"] for tensor in result["work"]["profile"]["tensors"])


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
        f"{_num_bytes(result) / MIB:.2g}",
        f"{1e3 * (profile['forward'] + profile['backward']):.0f}",
        *errors,
        recommended.method,
        f"{recommended.measured / ddp - 1:+.1%}",
        f"{recommended.measured / best - 1:+.1%}",
    ]
