"""``python -m benchmarks.weight_density``: weights of BSP, of averaged parameters or gradients (SelSync, Fig. 11).

Each rank has weights of its own where only gradients are averaged: what is shown are those of the ranks, not the mean.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import benchmarks.tasks.mnist1d
import benchmarks.tasks.signals  # noqa: F401 - both add themselves to the tasks
from benchmarks import command
from benchmarks.converge import config_of, points_of, seeded
from benchmarks.gradients.densities import LAYERS, check_layer, density_of
from benchmarks.intervals import mean_of
from benchmarks.tasks import Task, build_task
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.pictures import looks_of, picture
from lightning_pipesync.lab.bench.tables import table

_SELSYNC = "selsync:delta=0.25,smoothing=0.16"


@dataclass(frozen=True, kw_only=True)
class WeightDensity(Benchmark):
    """Trains with several methods, and compares the weights of a layer after half of a training and at its end.

    Attributes:
        task: digits, signals, mnist1d (classification) or topics (a language model).
        methods: As of `python -m benchmarks.converge`; the others are compared with the first.
        seeds: A training with each method for each of these.
        epochs: Of each training; the task's own if not given.
    """

    hosts: tuple[int, ...] = (4,)
    task: str = "digits"
    methods: tuple[str, ...] = ("ddp", _SELSYNC, f"{_SELSYNC},aggregation=gradients")
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int | None = None

    name = "weight_density"

    def __post_init__(self) -> None:
        check_layer(self.task)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods must be one or more different values, got {self.methods!r}.")
        for method in self.methods:
            config_of(method)
        if not self.seeds:
            raise ValueError("seeds must be one or more numbers.")
        if self.epochs is not None:
            self._check_positive("epochs")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return len(self.methods) * len(self.seeds)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Trains with every method, seed by seed; a collective call.

        Returns:
            Settings and ``runs``: method, seed and two ``points``, after half of the training and at its end, each with
            ``steps``, ``quality`` and ``spread`` of `benchmarks.converge`; the standard ``deviation`` of a rank's
            weights of the layer and the ``distance`` of their distribution from that of the first method
            (Wasserstein's; for the first method itself from that of the first seed), means over the ranks.
            ``densities`` has for both points the grid and the density of each method, of rank 0's weights with the
            first seed.
        """
        task, runs, of_first_seed = build_task(self.task), [], list[list[Tensor]]()
        first_ever: list[Tensor] = []
        for seed in self.seeds:
            first: list[Tensor] = []
            for method in self.methods:
                points, weights = [], list[Tensor]()
                for point, own in self._train(task, method, seed):
                    weights.append(own)
                    points.append(point)
                compared = first or first_ever
                for number, (point, own) in enumerate(zip(points, weights, strict=True)):
                    distance = _distance(own, compared[number]) if compared else 0.0
                    point |= dict(
                        zip(("deviation", "distance"), _mean_of_ranks(own.std().item(), distance), strict=True)
                    )
                first, first_ever = first or weights, first_ever or weights
                if seed == self.seeds[0]:
                    of_first_seed.append(weights)
                runs.append({"method": method, "seed": seed, "points": points})
                progress(f"{method}, seed {seed}")
        shown = [density_of(of_methods) for of_methods in zip(*of_first_seed, strict=True)]
        return {
            "settings": self.settings(),
            "world_size": dist.get_world_size(),
            "metric": f"test {task.metric}",
            "layer": LAYERS[self.task],
            "runs": runs,
            "densities": [{"grid": grid, "methods": densities} for grid, densities in shown],
        }

    def _train(self, task: Task, method: str, seed: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Trains, and yields each point with this rank's weights of the layer; a collective call."""
        training = seeded(task, method, seed)
        num_steps = (self.epochs or task.epochs) * training.steps_per_epoch
        for point in points_of(training, seed, num_steps, 2):
            kept = {key: point[key] for key in ("steps", "quality", "spread")}
            yield kept, training.module.get_parameter(LAYERS[self.task]).detach().flatten().clone()
        training.close()

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(_part(result) for result in results)

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws the densities after half of a training and at its end, a row of panels for each number of hosts."""
        path, size = self.output / "weight_density.png", (11, 4 * len(results))
        with picture(path, size, len(results), 2, legend="below", legend_columns=3) as panels:
            for row, result in zip(panels, results, strict=True):
                methods = result["settings"]["methods"]
                looks = looks_of(methods)
                for panel, density, name in zip(row, result["densities"], _POINTS, strict=True):
                    for method, values in zip(methods, density["methods"], strict=True):
                        look = {key: looks[method][key] for key in ("color", "linestyle")}
                        panel.plot(density["grid"], values, label=readable(method), **look)
                    panel.set(xlabel="weight", ylabel="density")
                    panel.set_title(f"{result['settings']['task']}, {result['layer']}, {name}", fontsize="medium")


#: The points of a training.
_POINTS = ("after half of the training", "at the end")


def _distance(own: Tensor, other: Tensor) -> float:
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(own.numpy(), other.numpy()))


def _mean_of_ranks(*values: float) -> list[float]:
    """Returns the mean of each value over the ranks; a collective call."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return list((summed / dist.get_world_size()).tolist())


def _part(result: dict[str, Any]) -> str:
    settings, rows = result["settings"], []
    first, *_ = settings["methods"]
    for number, name in enumerate(_POINTS):
        ends = [run["points"][number]["deviation"] for run in result["runs"] if run["method"] == first]
        scale = 100 / fmean(ends)
        for method in settings["methods"]:
            points = [run["points"][number] for run in result["runs"] if run["method"] == method]
            distances = [point["distance"] * scale for point in (points[1:] if method == first else points)]
            spreads = [100 * point["spread"] for point in points if point["spread"] is not None]
            rows.append(
                [
                    f"{readable(method)}, {name}",
                    mean_of([point["quality"] for point in points]),
                    mean_of(spreads),
                    mean_of([point["deviation"] for point in points], ".4f"),
                    mean_of(distances),
                ]
            )
    return f"""### Weights of {result["layer"]}, {settings["task"]}, {result["world_size"]} workers (Fig. 11)

Of the ranks' own weights: the spread around their mean, of the whole model, in % of its norm; the standard deviation of
the layer's; and the distance of their distribution from that of {first} with the same seed (Wasserstein's), in % of the
deviation of {first}. For {first} it is that from the first seed's: what chance does.

{table(["", result["metric"], "spread, %", "deviation", "distance, %"], rows)}"""


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.weight_density:WeightDensity"))
