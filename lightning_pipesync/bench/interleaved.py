"""Times what several things take, in turns, so that the noise of the machine meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def time_in_turns(
    operations: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Runs A B C A B C ... on all ranks of the default process group; a collective call.

    Args:
        operations: what to time, by name, in the same order on all ranks. The first round is not counted.
        rounds: how often each is timed.
        before: called with the name before each, untimed; then all ranks start together.
        after: called with the name after each, untimed.

    Returns:
        For each operation its seconds, round by round: those of the rank that took longest.
    """
    seconds = torch.zeros(len(operations), rounds + 1, dtype=torch.float64)
    for round_ in range(rounds + 1):
        for i, (name, operation) in enumerate(operations.items()):
            before(name)
            dist.barrier()
            start = time.perf_counter()
            operation()
            seconds[i, round_] = time.perf_counter() - start
            after(name)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {name: row[1:].tolist() for name, row in zip(operations, seconds, strict=True)}


def median_and_quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Returns the median and the quartiles on both sides of it."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, low, high
