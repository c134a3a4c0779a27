"""SelSync: why to synchronize, and when (its Sections II and III, Figs. 1a, 2 to 5, and 11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from benchmarks import scaling, sensitivity
from benchmarks.results.exhibit import Claim, Claims, Exhibit, Finding
from benchmarks.results.job import Job, Record
from benchmarks.results.views import drawn_by, reported, span

JOBS = (
    Job("selsync_scaling", "python -m benchmarks.scaling --rate 200mbit", 8),
    Job("selsync_batch_cost", "python -m benchmarks.batch_cost", 6),
    Job("selsync_sensitivity", "python -m benchmarks.sensitivity", 15),
    Job("selsync_weights", "python -m benchmarks.weight_density", 5),
)

#: The candidate of the figure.
_SERVER = "parameter server"


def _scaling(records: Sequence[Record]) -> Finding:
    [record] = records
    parts, cases = [], []
    for number, ratio in enumerate(record.results[0]["settings"]["ratio"]):
        found = [scaling.throughput(result, result["runs"][number], _SERVER) for result in record.results]
        parts.append(f"ratio {ratio:g}: {found[-1]:.2f} times one worker with {record.results[-1]['world_size']}")
        cases.append(found[-1] < record.results[-1]["world_size"] / 2)
    return Finding("; ".join(parts), cases)


def _batch(records: Sequence[Record]) -> Finding:
    [result] = records[0].results
    times = [model["seconds"][-1] / model["seconds"][0] for model in result["models"]]
    peaks = [model["peak"][-1] / model["peak"][0] for model in result["models"]]
    workers = result["settings"]["workers"]
    text = f"{workers[-1] / workers[0]:g} times the samples: {span(times, '.1f')} times as long, "
    return Finding(f"{text}{span(peaks, '.1f')} times the memory", [one > 2 for one in (*times, *peaks)])


def _of_tasks(value: Callable[[dict[str, Any]], float], records: Sequence[Record]) -> dict[str, float]:
    """Returns the mean of a value of a training for each task."""
    runs = [run for record in records for result in record.results for run in result["runs"]]
    return {task: fmean(map(value, own)) for task, own in sensitivity.by_task(runs).items()}


def _shown(found: dict[str, float]) -> str:
    return "; ".join(f"{task}: {value:.2f}" for task, value in found.items())


def _gradients(records: Sequence[Record]) -> Finding:
    found = _of_tasks(lambda run: run["densities"][-1]["deviation"] / run["densities"][0]["deviation"], records)
    return Finding(
        f"deviation in the last epoch over that in the first: {_shown(found)}", [x < 1 for x in found.values()]
    )


def _hessian(records: Sequence[Record]) -> Finding:
    found = _of_tasks(lambda run: sensitivity.follows_curvature(run, "variance")[0], records)
    return Finding(f"rank correlation, {_shown(found)}", [value > 0.5 for value in found.values()])


def _change(records: Sequence[Record]) -> Finding:
    found = _of_tasks(sensitivity.moves_with_quality, records)
    return Finding(f"rank correlation, {_shown(found)}", [value > 0.5 for value in found.values()])


def _means(runs: Sequence[dict[str, Any]], number: int, value: str) -> dict[str, float]:
    """Returns the mean of a value at a point of the trainings with each method."""
    methods = dict.fromkeys(run["method"] for run in runs)
    return {name: fmean(run["points"][number][value] for run in runs if run["method"] == name) for name in methods}


def _weights(records: Sequence[Record]) -> Finding:
    """How far the distributions are from BSP's; and whether that of averaged gradients is wider, as in the paper."""
    parts, cases = [], []
    for result in records[0].results:
        bsp, parameters, gradients = result["settings"]["methods"]
        for number, when in enumerate(("half way", "at the end")):
            distance, deviation = (_means(result["runs"], number, value) for value in ("distance", "deviation"))
            over, wider = distance[gradients] / distance[parameters], deviation[gradients] / deviation[bsp]
            parts.append(f"{when}, with gradients {over:.1f} times as far from BSP, and {wider:.2f} times as wide")
            cases += [over > 1, (wider > 1) == (when == "half way")]
    return Finding("; ".join(parts), cases)


EXHIBITS: tuple[Exhibit, ...] = (
    reported("selsync_scaling", "selsync_scaling"),
    drawn_by("selsync_scaling", "selsync_scaling", "scaling.png"),
    reported("selsync_batch_cost", "selsync_batch_cost"),
    drawn_by("selsync_batch_cost", "selsync_batch_cost", "batch_cost.png"),
    reported("selsync_sensitivity", "selsync_sensitivity"),
    drawn_by("selsync_gradients", "selsync_sensitivity", "sensitivity_density.png"),
    drawn_by("selsync_hessian", "selsync_sensitivity", "sensitivity_hessian.png"),
    drawn_by("selsync_changes", "selsync_sensitivity", "sensitivity_change.png"),
    reported("selsync_weights", "selsync_weights"),
    drawn_by("selsync_weights", "selsync_weights", "weight_density.png"),
    Claims(
        "selsync_motivation_claims",
        (
            Claim(
                "Fig. 1a",
                "with a parameter server 16 workers are 3 times as fast as one (ResNet101), 2 are slower (VGG11)",
                ("selsync_scaling",),
                _scaling,
            ),
            Claim("Fig. 2", "time and memory of a step grow with its mini-batch", ("selsync_batch_cost",), _batch),
            Claim("Fig. 3", "gradients get smaller, and more are close to 0", ("selsync_sensitivity",), _gradients),
            Claim(
                "Fig. 4",
                "the largest eigenvalue of the Hessian follows the variance of the gradient",
                ("selsync_sensitivity",),
                _hessian,
            ),
            Claim(
                "Fig. 5",
                "the relative gradient change moves with the quality, and flattens with it",
                ("selsync_sensitivity",),
                _change,
            ),
            Claim(
                "Fig. 11",
                "weights of averaged parameters are distributed as BSP's, those of averaged gradients are not: "
                "spread apart at first, and narrower in the end",
                ("selsync_weights",),
                _weights,
            ),
        ),
    ),
)
