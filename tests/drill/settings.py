"""Settings in which methods are drilled, for a network of a few layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Drilled:
    """Settings in which a method is drilled.

    ``repeatable``: two runs of the same seed have the same weights, bit for bit, whatever the ranks' pace.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True


DRILLED: dict[str, Sequence[Drilled]] = {
    "dear": (
        Drilled({"fusion": "none"}),
        Drilled({"fusion": "buffer", "bucket_mb": 1e-4, "update": "sharded", "compression": "int8"}),
    ),
    "selsync": (
        Drilled({"delta": 0.2, "smoothing": 0.5}),
        Drilled({"delta": "auto", "lssr": 0.5, "outer_lr": 0.7, "overlap": "forward", "bucket_mb": 1e-4}),
    ),
    "local_sgd": (
        Drilled({"period": 2}),
        Drilled({"period": 2, "overlap_steps": 1, "outer_optimizer": "nesterov", "compression": "int8"}),
    ),
    "pipe_sgd": (Drilled(), Drilled({"staleness": 2, "compression": "int8"})),
    "parameter_server": (Drilled({"policy": "sync"}), Drilled({"policy": "k_async", "servers": 1}, repeatable=False)),
    "ea_pipe": (
        Drilled({"split": "parameters"}),  # by their time they would be divided differently in each run
        Drilled({"split": "parameters", "algorithm": "pipedream"}),
    ),
}

# Repeatable are those that the simulation has: with overlap and codecs a loss also drops what is under way.
DRILLED_JOBS: dict[str, Sequence[Drilled]] = {
    "local_sgd": (
        Drilled({"period": 2}),
        Drilled({"period": 2, "outer_optimizer": "nesterov"}),
        Drilled({"period": 3, "average_optimizer_states": True}),
        Drilled({"period": 3, "overlap_steps": 2, "outer_optimizer": "nesterov"}, repeatable=False),
        Drilled(
            {"period": 2, "fragments": 2, "overlap_steps": 1, "outer_optimizer": "nesterov", "compression": "int8"},
            repeatable=False,
        ),
        Drilled({"period": 2, "outer_optimizer": "nesterov", "compression": "int4"}, repeatable=False),
    ),
}


def of_ranks(method: str) -> Sequence[Drilled]:
    """Returns the settings of a method; a method of the user's own has its defaults."""
    return DRILLED.get(method, (Drilled(),))


def of_jobs(method: str) -> Sequence[Drilled]:
    """Returns those with which replicas that are jobs of their own are drilled; empty: they cannot be."""
    return DRILLED_JOBS.get(method, ())
