"""Times several operations in turns, so that the noise of the machine affects all equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timed:
    """The measurements of an operation, round by round."""

    seconds: list[float]  # on the slowest rank
    processor_seconds: list[float]  # user and system time of all threads of a rank, the mean of all ranks

    def over(self, number: int) -> Timed:
        """Returns the measurements of one of ``number`` repetitions, of which the operation consists."""
        return Timed([value / number for value in self.seconds], [value / number for value in self.processor_seconds])


def time_round_robin(
    operations: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, Timed]:
    """Runs A B C A B C ... on all ranks of the default process group, and times each; a collective call.

    The first round is a warm-up. ``before`` and ``after`` are called with the name of each operation, untimed; after
    ``before``, all ranks start together.
    """
    seconds = torch.zeros(len(operations), rounds + 1, dtype=torch.float64)
    processor_seconds = torch.zeros_like(seconds)
    for round_ in range(rounds + 1):
        for i, (name, operation) in enumerate(operations.items()):
            before(name)
            _finish_work()
            dist.barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            operation()
            _finish_work()
            seconds[i, round_] = time.perf_counter() - start
            processor_seconds[i, round_] = time.process_time() - processor_start
            after(name)
    of_ranks = [(seconds, processor_seconds)] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (seconds, processor_seconds))  # on any backend
    walls, processors = map(torch.stack, zip(*of_ranks, strict=True))
    each = zip(operations, walls.amax(0)[:, 1:].tolist(), processors.mean(0)[:, 1:].tolist(), strict=True)
    return {name: Timed(wall, processor) for name, wall, processor in each}


def timed(function: Callable[[], object]) -> float:
    """Returns how many seconds a function takes in this process, once."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _finish_work() -> None:
    """Waits for the work that a GPU has been given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def median_and_quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Returns the median, the lower and the upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, low, high
