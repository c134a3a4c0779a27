"""Many configurations on ranks that are launched once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tests.fuzz import pipelines, ranks
from tests.fuzz.methods import METHODS, TIMEOUT_S
from tests.fuzz.outcome import FAILED, Outcome
from tests.support.harness import launch

#: Runs and judges the configuration of a seed, by the method; of replicas of so many ranks, if that is not None.
RUNS: dict[str, Callable[[int, int | None], Outcome]] = {
    **{method: partial(ranks.run, method) for method in METHODS},
    "ea_pipe": lambda seed, num_shards: pipelines.run(seed),
}


def run_batch(method: str, seeds: Sequence[int], num_ranks: int, num_shards: int | None = None) -> list[Outcome]:
    """Runs the configurations of a method one after the other; launches anew after one at which a rank died or hung.

    Args:
        num_shards: the number of ranks among which each replica is sharded; None: each rank has a whole one.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(seeds):
        left = seeds[len(outcomes) :]
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            journal.touch()
            try:
                args = (method, left, num_shards, str(journal))
                how = {"timeout_s": 180 + 5 * len(left), "group_timeout_s": 4 * TIMEOUT_S}
                launched = launch(_run_seeds, num_ranks, *args, **how)
                return outcomes + launched[0]
            except AssertionError as error:
                done = len(journal.read_text().split())
                outcomes += run_batch(method, left[:done], num_ranks, num_shards) if done else []
                outcomes.append(Outcome(left[done], FAILED, str(error)))
    return outcomes


def reproduction(method: str, num_ranks: int, outcome: Outcome, num_shards: int | None = None) -> str:
    """Returns the command that repeats a configuration, and what became of it."""
    sharded = "" if num_shards is None else f" --shards {num_shards}"
    arguments = f"--method {method} --ranks {num_ranks}{sharded} --only {outcome.seed}"
    return f"python -m tests.fuzz {arguments}\n{outcome.problem}"


def _run_seeds(method: str, seeds: Sequence[int], num_shards: int | None, journal: str) -> list[Outcome]:
    """Runs on each rank; rank 0 writes a line for each configuration that has ended."""
    outcomes = []
    for seed in seeds:
        outcomes.append(RUNS[method](seed, num_shards))
        if dist.get_rank() == 0:
            with Path(journal).open("a") as file:
                file.write(f"{seed}\n")
    return outcomes
