"""Tables of the time of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import StepCost
from lightning_pipesync.core.pipe_cost import iterations_to_bound
from lightning_pipesync.lab.bench.round_robin import median_and_quartiles
from lightning_pipesync.lab.bench.tables import table


@dataclass(frozen=True)
class Row:
    """One candidate in one run.

    Attributes:
        name: the name of the candidate.
        seconds: the median seconds of a step.
        quartiles: the lower and the upper quartile.
        over_ddp: the speed-up over DDP with its best bucket size.
        of_limit: the limit of this kind of method over its time.
        of_layer_limit: the same for the layers of this model.
        exposed: seconds of exposed communication: what a step takes beyond the parts of its computation, as profiled.
        scaling_efficiency: T(1) / T(n), where T(1) is the step without communication, in turns with it.
        communication_overhead: T(n) - T(1), in seconds.
        processor: the median seconds of processor time of a step, all threads of a rank.
        prediction_error: the relative error of the cost model; None without a prediction.
    """

    name: str
    seconds: float
    quartiles: tuple[float, float]
    over_ddp: float
    of_limit: float
    of_layer_limit: float
    exposed: float
    scaling_efficiency: float
    communication_overhead: float
    processor: float
    prediction_error: float | None


def rows_of(run: dict[str, Any]) -> list[Row]:
    """Returns a row for each candidate of one ratio, compared with DDP at its best bucket size."""
    cost = StepCost(**run["cost"])
    timed = {one["name"]: median_and_quartiles(one["seconds"]) for one in run["candidates"]}
    best_ddp = min(median for name, (median, _, _) in timed.items() if name.startswith("DDP, "))
    alone, _, _ = timed["no communication"]
    rows = []
    for one in run["candidates"]:
        median, low, high = timed[one["name"]]
        error = None if one["predicted"] is None else one["predicted"] / median - 1
        rows.append(
            Row(
                name=one["name"],
                seconds=median,
                quartiles=(low, high),
                over_ddp=best_ddp / median,
                of_limit=one["limit"] / median,
                of_layer_limit=one["layer_limit"] / median,
                exposed=max(0.0, median - cost.compute),
                scaling_efficiency=alone / median,
                communication_overhead=median - alone,
                processor=median_and_quartiles(one["processor_seconds"])[0],
                prediction_error=error,
            )
        )
    return rows


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table for each number of hosts and each ratio."""
    headings = [
        "",
        "ms a step",
        "quartiles",
        "over DDP",
        "of its limit",
        "for these layers",
        "exposed ms",
        "scaling efficiency",
        "communication overhead ms",
        "processor ms",
        "predicted",
    ]
    parts = []
    for result in results:
        for run in result["runs"]:
            parts += [_heading(result, run), table(headings, [_cells(row) for row in rows_of(run)])]
            parts += [_search(one) for one in run["candidates"] if one["search"]]
    return "\n".join(parts)


def _heading(result: dict[str, Any], run: dict[str, Any]) -> str:
    world_size, cost = result["world_size"], StepCost(**run["cost"])
    model, mib, mbit = result["settings"]["model"], run["num_bytes"] / MIB, result["bandwidth"] * 8 / 1e6
    late = iterations_to_bound(1.0, staleness=1) / iterations_to_bound(1.0, staleness=0)
    return f"""### {world_size} hosts, communication {cost.ratio:.2g} times computation

{model}, {mib:.1f} MiB of gradients; plain TCP reaches {mbit:.0f} Mbit/s.
Computation: forward {_ms(cost.forward)}, backward {_ms(cost.backward)}, update {_ms(cost.update)} ms.
An all-reduce takes at least {_ms(cost.all_reduce)} ms. So a step takes at least {_ms(cost.baseline)} ms with the
all-reduce under backward (Eq. 8), {_ms(cost.dear)} with the paper's DeAR (Eq. 7), {_ms(cost.eager)} with gathers under
backward, too, {_ms(cost.pipe_sgd)} with Pipe-SGD, which
may need {late:g} times as many (its convergence bound, 8 F L sqrt((k + 1) / T)): {_ms(late * cost.pipe_sgd)} ms.
The largest possible speed-up over one host (Eq. 6) is {cost.max_speedup(world_size):.2f}.
With T(n) the time of a step on n hosts, and T(1) that of the step without communication, with the same mini-batch on
each host: scaling efficiency = T(1) / T(n), communication overhead = T(n) - T(1), speed-up = n T(1) / T(n).
"""


def _search(candidate: dict[str, Any]) -> str:
    found, (seconds, _, _) = candidate["search"], median_and_quartiles(candidate["seconds"])
    lost = found["seconds"] / seconds - found["steps"]
    return (
        f"{candidate['name']}: {found['trials']} sizes tried in {found['steps']} steps, which took as long as "
        f"{lost:.1f} steps more; found {found['size']:.1f} MiB, {found['edge'] or found['size']:.1f} at the ends.\n"
    )


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        _ms(row.seconds),
        f"{_ms(row.quartiles[0])} to {_ms(row.quartiles[1])}",
        f"{row.over_ddp:.2f}",
        f"{row.of_limit:.0%}",
        f"{row.of_layer_limit:.0%}",
        _ms(row.exposed),
        f"{row.scaling_efficiency:.0%}",
        _ms(row.communication_overhead),
        _ms(row.processor),
        "" if row.prediction_error is None else f"{row.prediction_error:+.0%}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
