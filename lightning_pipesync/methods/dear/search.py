"""Searches for the best bucket size (DeAR, Section IV-B)."""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_pipesync.core.buckets import Fusion

if TYPE_CHECKING:
    from bayes_opt import BayesianOptimization

#: Expected improvement prefers exploration (Section IV-B); in percent of the throughput of the first trial.
XI = 0.1

#: The search has converged after so many trials in a row that were not faster than the best by ``PROGRESS``.
PATIENCE, PROGRESS = 5, 0.005

#: How many times the buckets at both ends are halved, at most.
MAX_HALVINGS = 4.0

#: Share of noise in the variance of the measurements.
NOISE = 0.05

#: Trials after the first one, before the Gaussian process has data: position in the logarithmic range of sizes, and how
#: many times the buckets at both ends are halved.
STARTS = ((0.5, 2.0), (0.85, 3.0))


@dataclass(frozen=True)
class Trial:
    """The measured duration of a step with a fusion of tensors."""

    fusion: Fusion
    seconds: float


def fastest(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.seconds)


class FusionSearch(ABC):
    """Searches for the bucket size, and the size of the buckets at both ends, with the shortest step."""

    def __init__(self, first: Fusion, smallest_mb: float, largest_mb: float, max_trials: int, seed: int = 0) -> None:
        self._first, self._max_trials, self._seed = first, max_trials, seed
        self._sizes = math.log2(smallest_mb), math.log2(largest_mb)
        self.trials: list[Trial] = []

    @property
    def converged(self) -> bool:
        return len(self.trials) >= self._max_trials

    def register(self, trial: Trial) -> None:
        """Adds a trial, also one that was not suggested."""
        self.trials.append(trial)

    def suggest(self) -> Fusion:
        """Returns the fusion of the next trial."""
        return self._suggest() if self.trials else self._first

    @abstractmethod
    def _suggest(self) -> Fusion: ...


class BayesianSearch(FusionSearch):
    """Bayesian optimization with a Gaussian process and expected improvement, over the logarithms of both sizes."""

    def __init__(self, first: Fusion, smallest_mb: float, largest_mb: float, max_trials: int, seed: int = 0) -> None:
        super().__init__(first, smallest_mb, largest_mb, max_trials, seed)
        self._optimization: BayesianOptimization | None = None
        self._learned: set[tuple[float, float]] = set()

    @property
    def converged(self) -> bool:
        if super().converged:
            return True
        if len(self.trials) <= PATIENCE:
            return False
        before, recent = self.trials[:-PATIENCE], self.trials[-PATIENCE:]
        return fastest(recent).seconds > fastest(before).seconds * (1 - PROGRESS)

    def _suggest(self) -> Fusion:
        if len(self.trials) <= len(STARTS):
            place, halvings = STARTS[len(self.trials) - 1]
            return _fusion(self._sizes[0] + place * (self._sizes[1] - self._sizes[0]), halvings)
        if self._optimization is None:
            self._optimization = self._gaussian_process()
        for trial in self.trials:
            size, halvings = point = self._point(trial.fusion)
            if point not in self._learned:
                self._learned.add(point)
                throughput = 100 * self.trials[0].seconds / trial.seconds
                self._optimization.register({"size": size, "halvings": halvings}, throughput)
        suggestion = self._optimization.suggest()
        return _fusion(float(suggestion["size"]), float(suggestion["halvings"]))

    def _gaussian_process(self) -> BayesianOptimization:
        from bayes_opt import BayesianOptimization  # imports scikit-learn: a second that only a search should cost
        from bayes_opt.acquisition import ExpectedImprovement

        optimization = BayesianOptimization(
            None,
            {"size": self._sizes, "halvings": (0.0, MAX_HALVINGS)},
            acquisition_function=ExpectedImprovement(xi=XI),
            random_state=self._seed,
            verbose=0,
        )
        optimization.set_gp_params(alpha=NOISE)
        return optimization

    def _point(self, fusion: Fusion) -> tuple[float, float]:
        """Returns the logarithms of both sizes, within their ranges."""
        assert fusion.bucket_mb is not None
        low, high = self._sizes
        halvings = math.log2(fusion.bucket_mb / (fusion.edge_mb or fusion.bucket_mb))
        return min(max(math.log2(fusion.bucket_mb), low), high), min(halvings, MAX_HALVINGS)


class RandomSearch(FusionSearch):
    """Sizes drawn evenly from the logarithmic ranges (Fig. 10)."""

    def _suggest(self) -> Fusion:
        draw = random.Random(f"{self._seed}, {len(self.trials)}")
        return _fusion(draw.uniform(*self._sizes), draw.uniform(0.0, MAX_HALVINGS))


class GridSearch(FusionSearch):
    """Sizes at even distances in the logarithmic ranges, from the smallest to the largest (Fig. 10)."""

    def _suggest(self) -> Fusion:
        low, high = self._sizes
        num_sizes = max(2, (self._max_trials - 1) // 3)
        sizes = [low + (high - low) * i / (num_sizes - 1) for i in range(num_sizes)]
        grid = list(itertools.product(sizes, (0.0, MAX_HALVINGS / 2, MAX_HALVINGS)))
        number = len(self.trials) - 1
        return _fusion(*grid[number]) if number < len(grid) else self._first


SEARCHES: dict[str, type[FusionSearch]] = {"bo": BayesianSearch, "random": RandomSearch, "grid": GridSearch}


def _fusion(size: float, halvings: float) -> Fusion:
    return Fusion(bucket_mb=2.0**size, edge_mb=2.0 ** (size - halvings))
