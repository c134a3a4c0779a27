"""The report of the time of a training step: tables and pictures (DeAR, Figs. 7 and 8)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import StepCost
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.round_robin import median_and_quartiles
from lightning_pipesync.lab.bench.tables import table_of


@dataclass(frozen=True)
class Row:
    """One candidate in one run; medians, in seconds."""

    name: str
    seconds: float
    quartiles: tuple[float, float]
    #: The speed-up over DDP with its best bucket size.
    over_ddp: float
    #: The limit of this kind of method over its time, in general and for the layers of this model.
    of_limit: float
    of_layer_limit: float
    #: What a step takes beyond the parts of its computation, as profiled.
    exposed: float
    #: T(1) / T(n), where T(1) is the step without communication, in turns with it.
    scaling_efficiency: float
    #: Processor time of a step, all threads of a rank.
    processor: float
    #: The relative error of the cost model; None without a prediction.
    prediction_error: float | None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


#: Narrow enough that a terminal of 80 columns has place for the names; the heading explains them.
COLUMNS = {
    "": lambda row: row.name,
    "ms": lambda row: _ms(row.seconds),
    "quartiles": lambda row: "-".join(map(_ms, row.quartiles)),
    "x DDP": lambda row: f"{row.over_ddp:.2f}",
    "limit": lambda row: f"{row.of_limit:.0%}",
    "layers": lambda row: f"{row.of_layer_limit:.0%}",
    "T1/Tn": lambda row: f"{row.scaling_efficiency:.0%}",
    "CPU": lambda row: _ms(row.processor),
    "model": lambda row: "" if row.prediction_error is None else f"{row.prediction_error:+.0%}",
}


def rows_of(run: dict[str, Any]) -> list[Row]:
    """Returns a row for each candidate of one ratio, compared with DDP at its best bucket size."""
    cost = StepCost(**run["cost"])
    timed = {measured["name"]: median_and_quartiles(measured["seconds"]) for measured in run["candidates"]}
    best_ddp = min(median for name, (median, _, _) in timed.items() if name.startswith("DDP, "))
    alone, _, _ = timed["no communication"]
    rows = []
    for measured in run["candidates"]:
        median, *quartiles = timed[measured["name"]]
        rows.append(
            Row(
                name=measured["name"],
                seconds=median,
                quartiles=(quartiles[0], quartiles[1]),
                over_ddp=best_ddp / median,
                of_limit=measured["limit"] / median,
                of_layer_limit=measured["layer_limit"] / median,
                exposed=max(0.0, median - cost.compute),
                scaling_efficiency=alone / median,
                processor=median_and_quartiles(measured["processor_seconds"])[0],
                prediction_error=None if measured["predicted"] is None else measured["predicted"] / median - 1,
            )
        )
    return rows


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table for each number of hosts and each ratio."""
    parts = []
    for result in results:
        for run in result["runs"]:
            parts += [_heading(result, run), table_of(rows_of(run), COLUMNS)]
            parts += [_search(searched) for searched in run["candidates"] if searched["search"]]
    return "\n".join(parts)


def _heading(result: dict[str, Any], run: dict[str, Any]) -> str:
    world_size, cost = result["world_size"], StepCost(**run["cost"])
    model, mib, mbit = result["settings"]["model"], run["num_bytes"] / MIB, result["bandwidth"] * 8 / 1e6
    halves, pipe = cost.two_halves, cost.under_next_step
    return f"""### {world_size} hosts, communication {cost.ratio:.2g} times computation

{model}, {mib:.1f} MiB of gradients; plain TCP reaches {mbit:.0f} Mbit/s.
Computation: forward {_ms(cost.forward)}, backward {_ms(cost.backward)}, update {_ms(cost.update)} ms.
An all-reduce takes at least {_ms(cost.all_reduce)} ms. So a step takes at least {_ms(cost.baseline)} ms with the
all-reduce under backward (Eq. 8), {_ms(halves)} with the paper's DeAR (Eq. 7), {_ms(cost.eager)} with gathers under
backward, too, {_ms(pipe)} with Pipe-SGD, which
may need twice as many (its convergence bound, 8 F L sqrt((k + 1) / T)): {_ms(2 * pipe)} ms.
The largest possible speed-up over one host (Eq. 6) is {cost.max_speedup(world_size):.2f}.

Columns: the median of a step in **ms** and its **quartiles**; how many times as fast it is as DDP with its best bucket
size (**x DDP**); the share of the **limit** of its kind of method that it reaches, and of the limit for the **layers**
of this model; its scaling efficiency (**T1/Tn**); processor time of all threads of a rank in ms (**CPU**); the error of
the cost **model**. T(n) is the time of a step on n hosts, T(1) that of the step without communication, with the same
mini-batch on each host: communication overhead = T(n) - T(1), speed-up = n T(1) / T(n).
"""


def _search(candidate: dict[str, Any]) -> str:
    found, (seconds, _, _) = candidate["search"], median_and_quartiles(candidate["seconds"])
    lost = found["seconds"] / seconds - found["steps"]
    return (
        f"{candidate['name']}: {found['trials']} sizes tried in {found['steps']} steps, which took as long as "
        f"{lost:.1f} steps more; found {found['size']:.1f} MiB, {found['edge'] or found['size']:.1f} at the ends.\n"
    )


def draw_speedup(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the speed-up over DDP by the ratio of communication to computation, with the limits."""
    with picture(path, (5 * len(results), 4.5), columns=len(results), legend="panel", sharey=True) as panels:
        for panel, result in zip(panels[0], results, strict=True):
            costs = [StepCost(**run["cost"]) for run in result["runs"]]
            ratios = [cost.ratio for cost in costs]
            by_run = [{row.name: row for row in rows_of(run)} for run in result["runs"]]
            shown = [name for name in by_run[0] if not name.startswith("DDP, ") and name != "no communication"]
            for name, look in looks_of(shown).items():
                panel.plot(ratios, [rows[name].over_ddp for rows in by_run], markersize=4, label=name, **look)
            limits = [cost.baseline / cost.two_halves for cost in costs]
            panel.plot(ratios, limits, ":k", label="limit of DeAR (Eqs. 7, 8)")
            panel.plot(ratios, [cost.baseline / cost.eager for cost in costs], "--k", label="limit of eager gathers")
            panel.plot(ratios, [cost.baseline / cost.compute for cost in costs], "-.k", label="without communication")
            panel.axhline(1.0, color="gray", linewidth=0.8)
            panel.set(xscale="log", xlabel="communication / computation", ylabel="times as fast as DDP")
            panel.set_title(f"{result['world_size']} hosts")
            panel.set_xticks(ratios, [f"{ratio:.2g}" for ratio in ratios])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
