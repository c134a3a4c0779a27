"""Many configurations on ranks that are launched once."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.fuzz.configuration import draw
from tests.fuzz.ranks import Outcome, run
from tests.harness import launch


def run_batch(method: str, seeds: Sequence[int], ranks: int) -> list[Outcome]:
    """Runs the configurations of a method one after the other; launches anew after one at which a rank died or hung."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(seeds):
        left = seeds[len(outcomes) :]
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            journal.touch()
            try:
                launched = launch(_run_seeds, ranks, method, left, str(journal), timeout_s=60 + 5 * len(left))
                return outcomes + launched[0]
            except AssertionError as error:
                done = len(journal.read_text().split())
                outcomes += run_batch(method, left[:done], ranks) if done else []
                outcomes.append(Outcome(left[done], "failed", str(error)))
    return outcomes


def reproduction(method: str, ranks: int, outcome: Outcome) -> str:
    """Returns the command that repeats a configuration, and what became of it."""
    return f"python -m tests.fuzz --method {method} --ranks {ranks} --only {outcome.seed}\n{outcome.problem}"


def _run_seeds(method: str, seeds: Sequence[int], journal: str) -> list[Outcome]:
    """Runs on each rank; rank 0 writes a line for each configuration that has ended."""
    outcomes = []
    for seed in seeds:
        outcomes.append(run(draw(method, seed, dist.get_world_size())))
        if dist.get_rank() == 0:
            with Path(journal).open("a") as file:
                file.write(f"{seed}\n")
    return outcomes
