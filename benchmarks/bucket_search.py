"""``python -m benchmarks.bucket_search``: the trials that searches for the bucket size need (DeAR, Fig. 10)."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import benchmarks.baselines.networks  # noqa: F401 - adds them to the tables
from benchmarks import command
from lightning_pipesync.core.buckets import MIB, Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.cost import LinkCost, end_of_pipeline
from lightning_pipesync.core.parameters import NamedParameter, collect_parameters
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.emulated import EmulatedLayer, EmulatedModel
from lightning_pipesync.lab.bench.models import TABLES
from lightning_pipesync.lab.bench.pictures import COLOURS, picture
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.methods.dear.search import SEARCHES, Trial, fastest

#: A search has found a good size once its best is within this share of the best of a fine grid.
GOOD = 0.03


@dataclass(frozen=True)
class Step:
    """A step of DeAR by the cost model, with the paper's schedule.

    Attributes:
        parameters: In the order of their gradients.
        shares: Of the computation that belongs to each parameter; they sum to 1.
        backward: Seconds of the backward pass; the forward pass takes half as long.
        link: The network.
        world_size: Number of ranks.
    """

    parameters: Sequence[NamedParameter]
    shares: Sequence[float]
    backward: float
    link: LinkCost
    world_size: int

    def seconds(self, fusion: Fusion) -> float:
        """Returns the seconds of a step: the reduce-scatters under backward, the all-gathers under forward."""
        buckets = plan_buckets(self.parameters, fusion)
        sizes = [sum(map(num_bytes, bucket)) for bucket in buckets]
        ends = [0, *accumulate(map(len, buckets))]
        share = [sum(self.shares[start:end]) for start, end in pairwise(ends)]
        ready = [self.backward * part for part in accumulate(share)]
        reduced = end_of_pipeline(ready, [self.link.reduce_scatter(size, self.world_size) for size in sizes])
        arrived = moment = 0.0
        for size, part in zip(reversed(sizes), reversed(share), strict=True):  # ready last, needed first
            arrived += self.link.all_gather(size, self.world_size)
            moment = max(moment, arrived) + self.backward / 2 * part
        return max(self.backward, reduced) + moment

    def best(self, largest_mb: float) -> float:
        """Returns the seconds with the best of a fine grid."""
        sizes = [largest_mb ** (i / 30) for i in range(31)]
        return min(self.seconds(Fusion(size, size / 2**halvings)) for size in sizes for halvings in range(5))


@dataclass(frozen=True, kw_only=True)
class BucketSearch(Command):
    """Searches for the bucket size of networks, whose steps take what the cost model says, with noise.

    Attributes:
        models: resnet50, densenet201, inceptionv4, bert-base, bert-large or alexnet, of their true sizes.
        searches: bo (Bayesian optimization), random or grid.
        world_size: Number of ranks.
        gbit: Of the links, per second.
        latency_us: Of a message, in microseconds.
        ratio: Communication time over computation time.
        noise: Standard deviation of a measurement, as a share of it.
        trials: Largest number of a search.
        seeds: A search runs once for each of these, each with other noise, and other draws.
    """

    models: tuple[str, ...] = ("resnet50", "densenet201", "inceptionv4", "bert-base", "bert-large")
    searches: tuple[str, ...] = tuple(SEARCHES)
    world_size: int = 64
    gbit: float = 10.0
    latency_us: float = 50.0
    ratio: float = 1.0
    noise: float = 0.01
    trials: int = 40
    seeds: tuple[int, ...] = tuple(range(10))

    name = "bucket_search"

    def __post_init__(self) -> None:
        for name, known in (("models", TABLES), ("searches", SEARCHES)):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name}: {value!r} is not known; there are {', '.join(known)}.")
        self._check_positive("world_size", "gbit", "latency_us", "ratio", "trials")
        if not self.noise >= 0:
            raise ValueError(f"noise must not be negative, got {self.noise!r}.")

    def results(self) -> list[dict[str, Any]]:
        """Searches with each seed.

        Returns:
            For each model and kind of search ``best``: seconds of the best of a fine grid; and of each seed ``steps``:
            the seconds of a step with the best that was found after each trial; and ``suggesting``, the mean seconds
            that a suggestion took.
        """
        runs = []
        with progress_bar("", len(self.models) * len(self.searches) * len(self.seeds)) as advance:
            for model in self.models:
                step = self.step_of(model)
                largest = self._largest(step)
                best = step.best(largest)
                for kind in self.searches:
                    for seed in self.seeds:
                        runs.append({"model": model, "search": kind, "seed": seed, "best": best})
                        runs[-1] |= self._search(step, kind, seed, largest)
                        advance(f"{model}, {kind}")
        return [{"settings": self.settings(), "environment": environment(), "runs": runs}]

    def step_of(self, model: str) -> Step:
        """Returns the step of a model in its true size."""
        link = LinkCost(self.latency_us * 1e-6, 8e-9 / self.gbit)
        with torch.device("meta"):
            network = EmulatedModel(TABLES[model](), forward_seconds=1, backward_seconds=2)
        layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, EmulatedLayer)}
        parameters = collect_parameters(network, [])[::-1]
        all_reduce = link.all_reduce(sum(map(num_bytes, parameters)), self.world_size)
        backward = 2 / 3 * all_reduce / self.ratio
        shares = [layers[one.layer].share / len([*layers[one.layer].parameters()]) for one in parameters]
        return Step(parameters, shares, backward, link, self.world_size)

    def _largest(self, step: Step) -> float:
        return min(100.0, sum(map(num_bytes, step.parameters)) / MIB)

    def _search(self, step: Step, kind: str, seed: int, largest: float) -> dict[str, Any]:
        search, draw = SEARCHES[kind](Fusion(bucket_mb=25), 1, largest, self.trials, seed), random.Random(seed)
        found, suggesting = [], 0.0
        while not search.converged:
            start = time.perf_counter()
            fusion = search.suggest()
            suggesting += time.perf_counter() - start
            search.register(Trial(fusion, step.seconds(fusion) * draw.gauss(1, self.noise)))
            found.append(step.seconds(fastest(search.trials).fusion))
        return {"steps": found, "suggesting": suggesting / len(found)}

    def report(self, results: list[dict[str, Any]]) -> str:
        """Returns the trials until a good size, those of the search, and how far its choice is from the best."""
        [result] = results
        rows = []
        for model in result["settings"]["models"]:
            for kind in result["settings"]["searches"]:
                runs = [run for run in result["runs"] if (run["model"], run["search"]) == (model, kind)]
                good = [first_good(run) for run in runs]
                ended = [number for number in good if number is not None]
                trials, lost = [len(run["steps"]) for run in runs], [run["steps"][-1] / run["best"] - 1 for run in runs]
                rows.append(
                    [
                        f"{model}, {kind}",
                        _mean(ended),
                        f"{len(ended)} of {len(runs)}",
                        _mean(trials),
                        f"{fmean(lost):.1%}",
                        f"{max(lost):.1%}",
                        f"{1e3 * fmean(run['suggesting'] for run in runs):.0f}",
                    ]
                )
        headings = ["", f"trials until within {GOOD:.0%}", "got there", "trials in all"]
        headings += ["its choice is off by", "at most", "ms a suggestion"]
        return table(headings, rows)

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws how far the best size so far is from the best, over the trials: mean and standard deviation."""
        [result] = results
        models, kinds = result["settings"]["models"], result["settings"]["searches"]
        path: Path = self.output / "bucket_search.png"
        with picture(path, (3.6 * len(models), 3.6), columns=len(models), legend="below", sharey=True) as panels:
            for panel, model in zip(panels[0], models, strict=True):
                for kind, color in zip(kinds, COLOURS[1:], strict=False):
                    runs = [run for run in result["runs"] if (run["model"], run["search"]) == (model, kind)]
                    length = max(len(run["steps"]) for run in runs)
                    # A search that has ended keeps what it found.
                    off = [
                        [100 * (run["steps"][min(i, len(run["steps"]) - 1)] / run["best"] - 1) for run in runs]
                        for i in range(length)
                    ]
                    ends = [stdev(values) if len(values) > 1 else 0.0 for values in off]
                    numbers = range(1, length + 1)
                    panel.errorbar(numbers, [*map(fmean, off)], ends, label=kind, color=color, elinewidth=0.7)
                panel.axhline(100 * GOOD, color="black", linestyle=":", label=f"{GOOD:.0%}")
                panel.set(xlabel="trials", title=model)
                panel.grid(alpha=0.3)
            panels[0, 0].set_ylabel("% longer than with the best size")


def first_good(run: dict[str, Any]) -> int | None:
    """Returns the number of trials after which the best of them is good; None if it never is."""
    limit = (1 + GOOD) * run["best"]
    return next((number for number, seconds in enumerate(run["steps"], start=1) if seconds <= limit), None)


def _mean(values: Sequence[int]) -> str:
    if not values:
        return "-"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}"


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.bucket_search:BucketSearch"))
