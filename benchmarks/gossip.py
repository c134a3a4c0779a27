"""``python -m benchmarks.gossip``: how fast replicas that average with neighbors come together, beside the theory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.intervals import interval_of, with_interval
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.pictures import colour_and_line, picture
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.methods.replicas.neighbors import Neighbors, contraction, mixing_matrix, neighborhood

KINDS: dict[Neighbors, str] = {"ring": "ring", "random_pairs": "random pairs"}

#: Values of each replica, whose spread is measured until it is no more than the rounding of doubles makes it.
_SIZE, _LEAST = 64, 1e-9
#: The least spread in the picture, and that of replicas that are close.
_SHOWN, _CLOSE = 1e-4, 0.01


@dataclass(frozen=True, kw_only=True)
class Gossip(Command):
    """Mixes random weights of replicas, round by round, without training.

    Attributes:
        replicas: Numbers of replicas.
        rounds: Number of rounds.
        repetitions: How often, each with other weights and other pairs.
        mib: Size of the model of which the cost model tells the seconds of a round.
        mbit: Rate of a link in Mbit/s.
        latency_ms: Of a message.
    """

    replicas: tuple[int, ...] = (4, 8, 16, 32, 64)
    rounds: int = 400
    repetitions: int = 30
    mib: float = 25.0
    mbit: float = 1000.0
    latency_ms: float = 1.0

    name = "gossip"

    def __post_init__(self) -> None:
        self._check_positive("rounds", "mib", "mbit", "latency_ms")
        if self.repetitions < 2:
            raise ValueError(f"repetitions must be at least 2, got {self.repetitions!r}.")
        if not self.replicas or min(self.replicas) < 4:
            raise ValueError(
                f"replicas must be 4 or more: on a ring of fewer all are neighbors, got {self.replicas!r}."
            )

    def results(self) -> list[dict[str, Any]]:
        """Mixes replicas on a ring, and in random pairs.

        Returns:
            Settings, environment, and for each kind and number of replicas the ``spread`` after each round over that at
            first, the root of the mean square over the repetitions; the ``measured`` factor of a round; for pairs, half
            the confidence ``interval`` of it; and the ``theory``.
        """
        measured = []
        with progress_bar("", len(KINDS) * len(self.replicas)) as advance:
            for kind in KINDS:
                for number in self.replicas:
                    measured.append(self._measure(kind, number))
                    advance(f"{KINDS[kind]} of {number}")
        return [{"settings": self.settings(), "environment": environment(), "curves": measured}]

    def _measure(self, kind: Neighbors, number: int) -> dict[str, Any]:
        """Measures the factor of a round: in the second half, on a ring, where one eigenvector is left."""
        squares = [self._squared_spreads(kind, number, repetition) for repetition in range(self.repetitions)]
        ratios = [after / before for values in squares for before, after in _pairs_of(values, kind)]
        spread = [math.sqrt(fmean(values)) for values in zip_longest(*squares, fillvalue=0.0)]
        measured, interval = math.sqrt(fmean(ratios)), interval_of(ratios)
        return {
            "neighbors": kind,
            "replicas": number,
            "spread": [float(f"{value:.4g}") for value in spread],
            "measured": measured,
            "interval": None if kind == "ring" or interval is None else interval / (2 * measured),
            "theory": contraction(kind, number),
        }

    def _squared_spreads(self, kind: Neighbors, number: int, repetition: int) -> list[float]:
        """Returns the squared spread, over that at first, before and after each round until there is none left."""
        weights = np.random.default_rng(repetition).standard_normal((number, _SIZE))
        weights -= weights.mean(axis=0)
        first, squares = (weights**2).sum(), [1.0]
        while len(squares) <= self.rounds and squares[-1] > _LEAST**2:
            weights = mixing_matrix(kind, number, repetition * self.rounds + len(squares)) @ weights
            squares.append(float((weights**2).sum() / first))
        return squares

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(_report(result) for result in results)

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws the spread over the rounds and the theory, a panel for each kind."""
        curves = results[-1]["curves"]
        with picture(self.output / "gossip.png", (9, 4), 1, 2, legend="below", legend_columns=6, sharey=True) as panels:
            for panel, (kind, title) in zip(panels.flat, KINDS.items(), strict=True):
                for index, curve in enumerate(curve for curve in curves if curve["neighbors"] == kind):
                    color = colour_and_line(index)["color"]
                    shown = [value for value in curve["spread"][:61] if value > _SHOWN]
                    panel.plot(shown, color=color, label=f"{curve['replicas']} replicas")
                    theory = [curve["theory"] ** round_ for round_ in range(len(shown))]
                    panel.plot(theory, "--", color=color, label="theory" if index == 0 else None)
                panel.set(yscale="log", xlabel="rounds", title=title, ylim=(_SHOWN, 1.5))
                panel.grid(alpha=0.3)
            panels[0, 0].set_ylabel("spread of the replicas")


def _pairs_of(squares: list[float], kind: Neighbors) -> Iterator[tuple[float, float]]:
    return pairwise(squares[len(squares) // 2 :] if kind == "ring" else squares)


def rounds_until(spread: float, factor: float) -> int:
    """Returns the number of rounds, each by ``factor``, after which the spread has fallen to this share."""
    return math.ceil(math.log(spread) / math.log(factor))


def _report(result: dict[str, Any]) -> str:
    settings = result["settings"]
    num_bytes = settings["mib"] * MIB
    link = LinkCost(settings["latency_ms"] / 1e3, 8 / (settings["mbit"] * 1e6))
    rows = []
    for curve in result["curves"]:
        kind, number, theory = curve["neighbors"], curve["replicas"], curve["theory"]
        peers, rounds = len(neighborhood(kind, 0, number, 0)) - 1, rounds_until(_CLOSE, theory)
        peers = 1 if kind == "random_pairs" else peers  # or none, of an odd number
        whole = link.all_reduce(num_bytes, number)
        rows.append(
            [
                KINDS[kind],
                f"{number}",
                with_interval(curve["measured"], curve["interval"], ".3f"),
                f"{theory:.3f}",
                f"{1 - theory:.3f}",
                f"{rounds}",
                f"{peers} ({2 * (number - 1) / number:.2f})",
                f"{link.average_with(num_bytes, peers) / whole:.2f}",
            ]
        )
    headings = [
        "",
        "replicas",
        "measured",
        "theory",
        "gap",
        "rounds to 1%",
        "models sent (exact)",
        "seconds over exact",
    ]
    return f"""The factor by which a round shrinks the spread of the replicas, the root of their mean squared distance
to their average: for a ring, in the second half of the rounds, the second largest eigenvalue of the mixing matrix W,
for random pairs the root of that of E[W'W]. Models sent by a rank in a round, in brackets by an exact average. Seconds
of a round over those of an exact average, a ring all-reduce, by the cost model: {settings["mib"]:g} MiB,
{settings["mbit"]:g} Mbit/s, {settings["latency_ms"]:g} ms a message.

{table(headings, rows)}"""


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.gossip:Gossip"))
