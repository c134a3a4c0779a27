"""What a longer window of SelSync's tracker, and its order of the data, cost (Figs. 8a and 8b of its paper).

In one process:

    python -m benchmarks.selsync_overhead

benchmarks.overhead measures the whole tracker, and the flag, in a training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DistributedSampler

from lightning_pipesync import SelDPSampler
from lightning_pipesync.methods.selsync import GradientChangeTracker

WINDOWS = 25, 50, 100, 200
DATA_SETS = {"CIFAR": 50_000, "ImageNet": 1_281_167}


def timed(function: Callable[[], object]) -> float:
    """Returns how many seconds ``function`` takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def smoothing(steps: int) -> Table:
    """Times the smoothing of a step's squared norm, by the length of the window (Fig. 8a)."""
    table = Table("window", "microseconds a step", title="Smoothing the norm of a gradient")
    for window in WINDOWS:
        tracker = GradientChangeTracker(window, smoothing=0.16)
        for _ in range(window):
            tracker.update(1.0)
        seconds = median(timed(partial(tracker.update, 1.0)) for _ in range(steps))
        table.add_row(f"{window}", f"{seconds * 1e6:.1f}")
    return table


def order(ranks: int, rounds: int) -> Table:
    """Times how a rank gets its order of the data, with DefDP, which is torch's, and with SelDP (Fig. 8b)."""
    headings = "data set", "samples", "", "ms before the first epoch", "ms before each further one"
    table = Table(*headings, title=f"The order of the data on one of {ranks} ranks")
    for name, samples in DATA_SETS.items():
        kinds: dict[str, Any] = {"DefDP": DistributedSampler, "SelDP": SelDPSampler}
        for kind, sampler_type in kinds.items():
            first, further = [], []
            for _ in range(rounds):
                start = time.perf_counter()
                sampler = sampler_type(range(samples), ranks, 0)
                iter(sampler)
                first.append(time.perf_counter() - start)
                sampler.set_epoch(1)
                further.append(timed(partial(iter, sampler)))
            table.add_row(name, f"{samples:,}", kind, f"{median(first) * 1e3:.1f}", f"{median(further) * 1e3:.1f}")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of the tracker (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=16, help="that share the data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the samplers (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Console().print(smoothing(options.steps))
    Console().print(order(options.ranks, options.rounds))
