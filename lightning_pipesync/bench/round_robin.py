"""Times several operations in turns, so that the noise of the machine affects all equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def time_round_robin(
    operations: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Runs A B C A B C ... on all ranks of the default process group; a collective call.

    Args:
        operations: the operations by name, in the same order on all ranks. The first round is a warm-up.
        rounds: the number of measurements of each operation.
        before: called with the name before each operation, untimed; then all ranks start together.
        after: called with the name after each operation, untimed.

    Returns:
        The seconds of each operation, round by round, on the slowest rank.
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
    """Returns the median, the lower and the upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, low, high
