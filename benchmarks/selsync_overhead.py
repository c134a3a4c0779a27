"""``python -m benchmarks.selsync_overhead``: what a window and SelDP cost (SelSync, Figs. 8a and 8b).

In one process; ``benchmarks.overhead`` measures the whole tracker, and the flag, in a training.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from benchmarks import command
from lightning_pipesync import SelDPSampler
from lightning_pipesync.lab.bench.benchmark import Command
from lightning_pipesync.lab.bench.tables import environment, table_of
from lightning_pipesync.lab.bench.timing import timed
from lightning_pipesync.methods.selsync import GradientChangeTracker

WINDOWS = 25, 50, 100, 200
DATA_SETS = {"CIFAR": 50_000, "ImageNet": 1_281_167}


@dataclass(frozen=True, kw_only=True)
class SelSyncOverhead(Command):
    """Times the smoothing of SelSync's tracker by the length of its window, and its order of the data.

    Attributes:
        steps: Steps of the tracker.
        ranks: Number of ranks that share the data.
        rounds: Number of measurements of each order.
    """

    steps: int = 2000
    ranks: int = 16
    rounds: int = 5

    name = "selsync_overhead"

    def __post_init__(self) -> None:
        self._check_positive("steps", "ranks", "rounds")

    def results(self) -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        shared = {"settings": self.settings(), "environment": environment()}
        return [{**shared, "windows": self._windows(), "orders": self._orders()}]

    def _windows(self) -> list[dict[str, Any]]:
        """Times the smoothing of a step's squared norm (Fig. 8a)."""
        rows = []
        for window in WINDOWS:
            tracker = GradientChangeTracker(window, smoothing=0.16)
            for _ in range(window):
                tracker.update(1.0)
            seconds = median(timed(partial(tracker.update, 1.0)) for _ in range(self.steps))
            rows.append({"window": window, "seconds": seconds})
        return rows

    def _orders(self) -> list[dict[str, Any]]:
        """Times how a rank gets its order of the data, with DefDP, which is torch's, and with SelDP (Fig. 8b)."""
        rows = []
        kinds: dict[str, Any] = {"DefDP": DistributedSampler, "SelDP": SelDPSampler}
        for name, samples in DATA_SETS.items():
            for kind, sampler_type in kinds.items():
                first, further = [], []
                for _ in range(self.rounds):
                    start = time.perf_counter()
                    sampler = sampler_type(range(samples), self.ranks, 0)
                    iter(sampler)
                    first.append(time.perf_counter() - start)
                    sampler.set_epoch(1)
                    further.append(timed(partial(iter, sampler)))
                times = {"first_s": median(first), "further_s": median(further)}
                rows.append({"data": name, "samples": samples, "kind": kind, **times})
        return rows

    def report(self, results: list[dict[str, Any]]) -> str:
        [result] = results
        smoothing = table_of(
            result["windows"],
            {
                "window": lambda row: f"{row['window']}",
                "microseconds a step": lambda row: f"{1e6 * row['seconds']:.1f}",
            },
        )
        orders = table_of(
            result["orders"],
            {
                "samples": lambda row: f"{row['samples']:,} ({row['data']})",
                "": lambda row: row["kind"],
                "ms before the first epoch": lambda row: f"{1e3 * row['first_s']:.1f}",
                "ms before each later epoch": lambda row: f"{1e3 * row['further_s']:.1f}",
            },
        )
        return f"{smoothing}\nOn one of {result['settings']['ranks']} ranks:\n\n{orders}"

    def draw(self, results: list[dict[str, Any]]) -> None:
        """There is no picture."""


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.selsync_overhead:SelSyncOverhead"))
