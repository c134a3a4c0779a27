"""EA-Pipe: pipeline parallelism with elastic averaging (its Section IV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import ea_pipe_bound
from benchmarks.pipeline import Choice, choice_of, outcome_of
from benchmarks.results.exhibit import Claim, Claims, Exhibit, Finding, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.views import drawn_by, reported, span
from lightning_pipesync.lab.bench.tables import table

_PIPELINE = "python -m benchmarks.pipeline --model mlp --stages 8 --momentum 0.9"
_OTHERS = "sgd pipedream weight_stashing spectrain naive"
_FORCES = " ".join(f"ea_pipe:elastic_force={force}" for force in (0.1, 0.3, 0.5))
_GRID = "--batch_sizes 16 32 64 128 --seeds 0 1 2 3 4 --evaluations 20"

_50_STAGES = (
    "python -m benchmarks.pipeline --model residual_mlp --stages 50 --task digits --batch_sizes 4 --seeds 0 1 2 "
    "--evaluations 12"
)

#: Methods by the names of the papers.
METHODS = {
    "sgd": "SGD",
    "pipedream": "PipeDream, vertical sync (the paper's)",
    "weight_stashing": "PipeDream, weight stashing alone (its default)",
    "spectrain": "SpecTrain",
    "naive": "naive",
    "ea_pipe": "EA-Pipe",
}


def _last_and_lowest(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keeps of each training's points those that choices and tables need."""
    for result in results:
        for run in result["runs"]:
            if points := run["points"]:
                lowest = min(points, key=lambda point: point["validation"])
                run["points"] = [lowest, points[-1]] if lowest is not points[-1] else [lowest]
    return results


JOBS = (
    Job(
        "ea_pipe_batch_sizes_digits",
        f"{_PIPELINE} --task digits {_GRID} --epochs 200 --methods {_OTHERS} {_FORCES} "
        "--learning_rates 0.0003 0.001 0.002 0.003 0.01 0.03 0.1 0.3",
        12,
        _last_and_lowest,
    ),
    Job(
        "ea_pipe_batch_sizes_mnist1d",
        f"{_PIPELINE} --task mnist1d {_GRID} --epochs 100 --methods {_OTHERS} {_FORCES} "
        "--learning_rates 0.001 0.003 0.01 0.03 0.1 0.3",
        12,
        _last_and_lowest,
    ),
    Job(
        "ea_pipe_small_batches",
        f"{_PIPELINE} --task digits --batch_sizes 4 --seeds 0 1 2 3 4 5 6 7 --evaluations 10 --epochs 100 "
        f"--methods {_OTHERS} {_FORCES} --learning_rates 0.001 0.003 0.01 0.03 0.1",
        8,
        _last_and_lowest,
    ),
    Job(
        "ea_pipe_50_stages",
        f"{_50_STAGES} --epochs 120 --methods {_OTHERS} ea_pipe:elastic_force=0.1 ea_pipe:elastic_force=0.3 "
        "--learning_rates 0.1 0.03 0.01 0.003 0.001",
        60,
    ),
    Job(
        "ea_pipe_50_stages_long",
        f"{_50_STAGES} --epochs 1200 --methods ea_pipe:elastic_force=0.1 ea_pipe:elastic_force=0.3 "
        "--learning_rates 0.01 0.003",
        30,
    ),
    Job("ea_pipe_bound", "python -m benchmarks.ea_pipe_bound", 8),
    Job(
        "ea_pipe_throughput",
        "python -m benchmarks.stages --hosts 2 4 8 --rate 1gbit --stage_ms 100 --rounds 3 "
        "--methods ea_pipe ea_pipe:replicas=10 pipedream gpipe gpipe:micro_batches=16 1f1b",
        10,
    ),
)
_BATCH_SIZES = ("ea_pipe_batch_sizes_digits", "ea_pipe_batch_sizes_mnist1d")


@dataclass(frozen=True)
class Grid:
    """The trainings of one job."""

    result: dict[str, Any]

    @property
    def task(self) -> str:
        return str(self.result["settings"]["task"])

    @property
    def batch_sizes(self) -> list[int]:
        return list(self.result["settings"]["batch_sizes"])

    def choice(self, method: str, batch_size: int) -> Choice:
        """Returns the settings of a method that the validation set chooses."""
        runs = [run for run in self.result["runs"] if run["method"].partition(":")[0] == method]
        found = choice_of([run for run in runs if run["batch_size"] == batch_size])
        if found is None:
            raise ValueError(f"{method} diverges with all settings.")
        return found

    def error(self, method: str, batch_size: int) -> float:
        """Returns the test error at those settings."""
        error = self.choice(method, batch_size).outcome.error
        if error is None:
            raise ValueError(f"{self.task}: all trainings with batches of {batch_size} diverged.")
        return error


def _grids(records: Sequence[Record]) -> list[Grid]:
    return [Grid(result) for record in records for result in record.results]


def _chosen(records: Sequence[Record]) -> str:
    """Returns the test error at the settings that the validation set chooses, by batch size."""
    parts = []
    for grid in _grids(records):
        rows = []
        for method, shown in METHODS.items():
            choices = [grid.choice(method, size) for size in grid.batch_sizes]
            rows.append([shown, *(f"{one.outcome.text} ({one.lowest_after:.0f})" for one in choices)])
        parts.append(table([f"{grid.task}, batches of", *map(str, grid.batch_sizes)], rows))
    return "\n".join(parts)


def _by_rate(records: Sequence[Record]) -> str:
    """Returns the test error by learning rate."""
    [grid] = _grids(records)
    settings = grid.result["settings"]
    rows = []
    for method in settings["methods"]:
        runs = {rate: [] for rate in settings["learning_rates"]}  # type: dict[float, list[dict[str, Any]]]
        for run in grid.result["runs"]:
            if run["method"] == method:
                runs[run["learning_rate"]].append(run)
        name, _, force = method.partition(":elastic_force=")
        rows.append(
            [METHODS[name] + (f", alpha = {force}" if force else ""), *(outcome_of(one).text for one in runs.values())]
        )
    return table(
        [f"{grid.task}, {settings['stages']} stages", *(f"{rate:g}" for rate in settings["learning_rates"])], rows
    )


def _throughput(records: Sequence[Record]) -> str:
    """Returns ms per mini-batch, and the throughput relative to stages that never wait."""
    [record] = records
    names = record.results[0]["settings"]["methods"]
    rows = []
    for name in names:
        cells = []
        for result in record.results:
            [run] = result["runs"]
            seconds = seconds_of(run, name)
            cells.append(f"{1e3 * seconds:.1f} ({run['stage_seconds'] / seconds:.0%})")
        rows.append([f"`{name}`", *cells])
    return table(["", *(f"{result['world_size']} stages" for result in record.results)], rows)


def seconds_of(run: dict[str, Any], name: str) -> float:
    """Returns the seconds of a mini-batch in the steady state, the median of all rounds."""
    return median(next(one["seconds"] for one in run["candidates"] if one["name"] == name))


def _lower_error(records: Sequence[Record]) -> Finding:
    parts, cases = [], []
    for grid in _grids(records):
        gains = [grid.error("pipedream", size) - grid.error("ea_pipe", size) for size in grid.batch_sizes]
        cases += [gain > 0 for gain in gains]
        sizes = " to ".join(dict.fromkeys(map(str, (grid.batch_sizes[0], grid.batch_sizes[-1]))))
        parts.append(f"{grid.task}: {span(gains, '.1f')} points below PipeDream, batches of {sizes}")
    return Finding("; ".join(parts), cases)


def _spectrain(records: Sequence[Record]) -> Finding:
    """Whether SpecTrain's error is above those of the others, at the rate that suits each."""
    parts, cases = [], []
    for grid in _grids(records):
        above = {
            other: [grid.error("spectrain", size) - grid.error(other, size) for size in grid.batch_sizes]
            for other in ("pipedream", "ea_pipe")
        }
        cases += [difference > 0 for found in above.values() for difference in found]
        pipedream, ours = (span(found, "+.1f") for found in above.values())
        parts.append(f"{grid.task}: {pipedream} points from PipeDream's, {ours} from EA-Pipe's")
    return Finding(f"its error on {'; '.join(parts)}", cases)


def _stable(records: Sequence[Record]) -> Finding:
    """The largest rate at which a method's error is below 50 % with every seed."""
    [grid] = _grids(records)
    largest = {}
    for method in ("sgd", "pipedream", "ea_pipe:elastic_force=0.5"):
        rates = []
        for rate in grid.result["settings"]["learning_rates"]:
            runs = [r for r in grid.result["runs"] if (r["method"], r["learning_rate"]) == (method, rate)]
            if all(not run["diverged"] and run["points"][-1]["error"] < 50 for run in runs):
                rates.append(rate)
        largest[method.partition(":")[0]] = max(rates, default=0.0)
    shown = ", ".join(f"{METHODS[name].partition(',')[0]} up to {rate:g}" for name, rate in largest.items())
    return Finding(
        f"trains with every seed: {shown}",
        [largest["ea_pipe"] >= largest["sgd"], largest["pipedream"] < largest["sgd"]],
    )


def _as_fast(records: Sequence[Record]) -> Finding:
    [record] = records
    over = []
    for result in record.results:
        [run] = result["runs"]
        over.append(seconds_of(run, "ea_pipe") / seconds_of(run, "pipedream"))
    return Finding(f"a mini-batch takes {span(over)} times as long as PipeDream's", [one < 1.05 for one in over])


def _earlier(records: Sequence[Record]) -> Finding:
    """The epochs until the error on the validation set is lowest, since a mini-batch takes as long with both."""
    parts, over = [], []
    for grid in _grids(records):
        ratios = [
            grid.choice("ea_pipe", size).lowest_after / grid.choice("pipedream", size).lowest_after
            for size in grid.batch_sizes
        ]
        over += ratios
        parts.append(f"{grid.task}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    text = f"times PipeDream's epochs to its lowest error, batches of 16 to 128: {'; '.join(parts)}"
    return Finding(text, [ratio < 1 for ratio in over])


def _theorem(records: Sequence[Record]) -> Finding:
    """Up to the rate that the proof allows, and up to the one that the paper states."""
    parts, cases = [], []
    for proved, rate in ea_pipe_bound.RATES.items():
        curves = [curve for curve in records[0].results[0]["curves"] if curve["proved"] == proved]
        factors = [factor for curve in curves for factor in ea_pipe_bound.factors_of(curve)]
        cases.append(min(factors) >= 1)
        parts.append(f"{span(factors, '.1f')} times below at {rate}")
    return Finding("; ".join(parts), cases)


EXHIBITS: tuple[Exhibit, ...] = (
    Table("ea_pipe_batch_sizes", _BATCH_SIZES, _chosen),
    drawn_by("ea_pipe_batch_sizes", "ea_pipe_batch_sizes_digits", "pipeline_by_rate.png"),
    Table("ea_pipe_small_batches", ("ea_pipe_small_batches",), _by_rate),
    drawn_by("ea_pipe_long", "ea_pipe_small_batches", "pipeline_by_rate.png"),
    Table("ea_pipe_50_stages", ("ea_pipe_50_stages",), _by_rate),
    Table("ea_pipe_50_stages_long", ("ea_pipe_50_stages_long",), _by_rate),
    drawn_by("ea_pipe_50_stages", "ea_pipe_50_stages", "pipeline.png"),
    reported("ea_pipe_bound", "ea_pipe_bound"),
    drawn_by("ea_pipe_bound", "ea_pipe_bound", "ea_pipe_bound.png"),
    Table("ea_pipe_throughput", ("ea_pipe_throughput",), _throughput),
    drawn_by("ea_pipe_stages", "ea_pipe_throughput", "stages.png"),
    Claims(
        "ea_pipe_claims",
        (
            Claim(
                "Tables 1, 4, 8, 9",
                "level with PipeDream on CIFAR-10 (VGG-16), 2.58 points below it on CIFAR-100 (ResNet-34, 8 GPUs)",
                _BATCH_SIZES,
                _lower_error,
            ),
            Claim(
                "Tables 1, 4", "SpecTrain ends at a higher error than PipeDream and EA-Pipe", _BATCH_SIZES, _spectrain
            ),
            Claim(
                "Tables 7, 10",
                "2.19 points below PipeDream on ImageNet (ResNet-50, 50 simulated GPUs)",
                ("ea_pipe_50_stages",),
                _lower_error,
            ),
            Claim(
                "Figs. 3, 4",
                "trains as stably as SGD at high rates, PipeDream does not",
                ("ea_pipe_small_batches",),
                _stable,
            ),
            Claim("Tables 2, 5", "an epoch takes slightly longer than PipeDream's", ("ea_pipe_throughput",), _as_fast),
            Claim(
                "Tables 3, 6",
                "its lowest error in the least time on CIFAR-100, not on CIFAR-10",
                _BATCH_SIZES,
                _earlier,
            ),
            Claim("Theorem 1", "a bound on the mean squared gradient", ("ea_pipe_bound",), _theorem),
        ),
    ),
)
