"""The tables and the picture of ``benchmarks.quality``, from its results alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.intervals import interval_of, number, with_interval
from benchmarks.named_settings import parse_named, readable
from benchmarks.training import config_types
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.lab.bench.named_settings import split_method
from lightning_pipesync.lab.bench.pictures import COLOURS, MARKERS, colour_and_line, picture
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.lab.predictions import local_sgd

#: All-reduces of all gradients in computations of a step, at which the time is predicted.
RATIOS = (1, 4, 10)
#: The values of which codecs' sizes are taken.
_MANY = 2**20
_FORWARD = 1 / 3

Run = Mapping[str, Any]


def as_markdown(runs: Sequence[Run]) -> str:
    """Returns a table for each task, optimizer and number of workers."""
    return "\n".join(
        f"### {task} with {optimizer}, {workers} workers\n\n{_table(list(same))}"
        for (task, optimizer, workers), same in groupby(runs, key=_place)
    )


def difference(run: Run, ddp: Run) -> list[float]:
    """Returns by how much each seed's last quality is better than DDP's; in % of the perplexity where that counts."""
    pairs = zip(run["quality"][-1], ddp["quality"][-1], strict=True)
    if run["higher_is_better"]:
        return [own - other for own, other in pairs]
    return [100 * (other - own) / other for own, other in pairs]


def step_seconds(method: str, lssr: float, ratio: float) -> float:
    """Returns the time of a step by the cost model, in computations, if an all-reduce takes ``ratio`` of them.

    DDP's runs under the backward pass, two thirds of the computation (DeAR, Eq. 8). How rare averages are says the
    share of local steps, ``lssr``, since periods may follow the learning rate.
    """
    name, config = split_method(method)[0], parse_named(method, config_types())
    if name == "ddp":
        return _FORWARD + max(1 - _FORWARD, ratio)
    codec = get_codec(config.compression)
    ratio *= codec.wire_bytes(_MANY, torch.float32) / (4 * _MANY)
    if name == "pipe_sgd":
        return max(1.0, ratio)
    if name == "local_sgd" and config.period != "selsync":
        if config.neighbors == "random_pairs":
            ratio /= 2  # the weights once, not twice
        period = config.fragments / (1 - lssr) if lssr < 1 else math.inf
        settings = {"period": period, "fragments": config.fragments, "overlap_steps": config.overlap_steps}
        return local_sgd.step_seconds(1.0, ratio, ratio, settings)
    return 1 + (1 - lssr) * ratio


def _table(runs: list[Run]) -> str:
    ddp = next(run for run in runs if run["method"] == "ddp")
    headings = ["method", "at the end", "better by", "LSSR", *(f"sooner, ratio {ratio}" for ratio in RATIOS)]
    rows = []
    for run in runs:
        last, better = run["quality"][-1], difference(run, ddp)
        sooner = [number(_sooner(run, ddp, ratio), ".2f") for ratio in RATIOS]
        better_by = with_interval(fmean(better), interval_of(better), "+.2f")
        shown = with_interval(fmean(last), interval_of(last))
        rows.append([readable(run["method"]), shown, better_by, f"{run['lssr']:.2f}", *sooner])
    return table(headings, rows)


def _sooner(run: Run, ddp: Run, ratio: float) -> float | None:
    """Returns how many times as soon as DDP a method has the mean quality that DDP ends with.

    None: it never has, or its time depends on how fast each host is, as with parameter servers.
    """
    if split_method(run["method"])[0] == "parameter_server":
        return None
    target = fmean(ddp["quality"][-1])
    times = [_steps_to(one, target) for one in (run, ddp)]
    if times[0] is None or times[1] is None:
        return None
    return times[1] * step_seconds("ddp", 0.0, ratio) / (times[0] * step_seconds(run["method"], run["lssr"], ratio))


def _steps_to(run: Run, target: float) -> int | None:
    sign = 1 if run["higher_is_better"] else -1
    pairs = zip(run["steps"], run["quality"], strict=True)
    return next((steps for steps, found in pairs if sign * fmean(found) >= sign * target), None)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws the difference to DDP over the number of workers: a panel for each task and optimizer, a line a method."""
    panels_of = {key: list(same) for key, same in groupby(runs, key=lambda run: _place(run)[:2])}
    tasks, optimizers = (list(dict.fromkeys(key[place] for key in panels_of)) for place in range(2))
    methods = [method for method in dict.fromkeys(run["method"] for run in runs) if method != "ddp"]
    looks = {m: {**colour_and_line(i), "marker": MARKERS[i % len(MARKERS)]} for i, m in enumerate(methods)}
    size = (4.5 * len(optimizers), 2.8 * len(tasks) + 1)
    with picture(path, size, len(tasks), len(optimizers), legend="below", legend_columns=2) as panels:
        for (task, optimizer), same in panels_of.items():
            panel = panels[tasks.index(task), optimizers.index(optimizer)]
            for method in methods:
                _draw_line(panel, [run for run in same if run["method"] == method], same, looks[method])
            unit = "points" if same[0]["higher_is_better"] else "% of the perplexity"
            panel.set(
                title=f"{task}, {optimizer}", xscale="log", xlabel="workers", ylabel=f"better than DDP by, {unit}"
            )
            counts = sorted({run["workers"] for run in same})
            panel.set_xticks(counts, [str(count) for count in counts])
            panel.set_yscale("symlog", linthresh=5, subs=[2, 5])
            panel.yaxis.set_major_formatter("{x:+g}")
            panel.axhline(0, color=COLOURS[0], linewidth=1, label="ddp")
            panel.minorticks_off()
            panel.grid(alpha=0.3)


def _draw_line(panel: Any, runs: Sequence[Run], others: Sequence[Run], look: Mapping[str, Any]) -> None:
    by_workers = {run["workers"]: run for run in others if run["method"] == "ddp"}
    found = [difference(run, by_workers[run["workers"]]) for run in runs]
    errors = [interval_of(each) or 0.0 for each in found]
    workers = [run["workers"] for run in runs]
    panel.errorbar(workers, [*map(fmean, found)], errors, label=readable(runs[0]["method"]), capsize=2, **look)


def _place(run: Run) -> tuple[str, str, int]:
    return run["task"], run["optimizer"], run["workers"]
