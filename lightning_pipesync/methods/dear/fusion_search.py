"""Searches for the best bucket size while the training runs (DeAR, Section IV-B)."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from lightning_pipesync.core.buckets import MIB, MOST_BUCKETS, Fusion, num_bytes, of_one_kind
from lightning_pipesync.core.clock import Clock, Moment
from lightning_pipesync.core.comm.handle import Promise, Worker
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.extras import missing_extra
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.sharding import copies_of
from lightning_pipesync.methods.dear.buckets import FusedBuckets
from lightning_pipesync.methods.dear.config import SEARCH_MB, DeARConfig

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
    """Finds the bucket size, and the size of the buckets at both ends, with the shortest step.

    It keeps nothing: what is tried next follows from the ``trials`` so far.
    """

    @abstractmethod
    def converged(self, trials: Sequence[Trial]) -> bool:
        """Returns whether no trial is to follow."""

    @abstractmethod
    def suggest(self, trials: Sequence[Trial]) -> Fusion:
        """Returns the fusion of the next trial, after one or more."""


@dataclass(frozen=True)
class Comparison(FusionSearch):
    """Tries some ``candidates``, each once."""

    candidates: Sequence[Fusion]

    def converged(self, trials: Sequence[Trial]) -> bool:
        return not self._left(trials)

    def suggest(self, trials: Sequence[Trial]) -> Fusion:
        return self._left(trials)[0]

    def _left(self, trials: Sequence[Trial]) -> list[Fusion]:
        tried = [trial.fusion for trial in trials]
        return [fusion for fusion in self.candidates if fusion not in tried]


@dataclass(frozen=True)
class SearchInRange(FusionSearch):
    """Searches in a range of sizes; the first trial has the fusion ``first``."""

    first: Fusion
    smallest_mb: float
    largest_mb: float
    max_trials: int
    seed: int = 0

    def converged(self, trials: Sequence[Trial]) -> bool:
        return len(trials) >= self.max_trials

    @property
    def _sizes(self) -> tuple[float, float]:
        return math.log2(self.smallest_mb), math.log2(self.largest_mb)


class BayesianSearch(SearchInRange):
    """Bayesian optimization with a Gaussian process and expected improvement, over the logarithms of both sizes."""

    def converged(self, trials: Sequence[Trial]) -> bool:
        if super().converged(trials):
            return True
        if len(trials) <= PATIENCE:
            return False
        return fastest(trials[-PATIENCE:]).seconds > fastest(trials[:-PATIENCE]).seconds * (1 - PROGRESS)

    def suggest(self, trials: Sequence[Trial]) -> Fusion:
        if len(trials) <= len(STARTS):
            place, halvings = STARTS[len(trials) - 1]
            return _fusion(self._sizes[0] + place * (self._sizes[1] - self._sizes[0]), halvings)
        from bayes_opt import BayesianOptimization  # imports scikit-learn: a second that only a search should cost
        from bayes_opt.acquisition import ExpectedImprovement

        optimization = BayesianOptimization(
            None,
            {"size": self._sizes, "halvings": (0.0, MAX_HALVINGS)},
            acquisition_function=ExpectedImprovement(xi=XI),
            random_state=self.seed + len(trials),
            verbose=0,
        )
        optimization.set_gp_params(alpha=NOISE)
        measured: dict[tuple[float, float], float] = {}  # percent of the throughput of the first trial
        for trial in trials:
            measured.setdefault(self._point(trial.fusion), 100 * trials[0].seconds / trial.seconds)
        for (size, halvings), throughput in measured.items():
            optimization.register({"size": size, "halvings": halvings}, throughput)
        suggestion = optimization.suggest()
        return _fusion(float(suggestion["size"]), float(suggestion["halvings"]))

    def _point(self, fusion: Fusion) -> tuple[float, float]:
        """Returns the logarithms of both sizes, within their ranges."""
        assert fusion.bucket_mb is not None
        low, high = self._sizes
        halvings = math.log2(fusion.bucket_mb / (fusion.edge_mb or fusion.bucket_mb))
        return min(max(math.log2(fusion.bucket_mb), low), high), min(halvings, MAX_HALVINGS)


class RandomSearch(SearchInRange):
    """Sizes drawn evenly from the logarithmic ranges (Fig. 10)."""

    def suggest(self, trials: Sequence[Trial]) -> Fusion:
        draw = random.Random(f"{self.seed}, {len(trials)}")
        return _fusion(draw.uniform(*self._sizes), draw.uniform(0.0, MAX_HALVINGS))


class GridSearch(SearchInRange):
    """Sizes at even distances in the logarithmic ranges, from the smallest to the largest (Fig. 10)."""

    def suggest(self, trials: Sequence[Trial]) -> Fusion:
        low, high = self._sizes
        num_sizes = max(2, (self.max_trials - 1) // 3)
        sizes = [low + (high - low) * i / (num_sizes - 1) for i in range(num_sizes)]
        grid = list(itertools.product(sizes, (0.0, MAX_HALVINGS / 2, MAX_HALVINGS)))
        number = len(trials) - 1
        return _fusion(*grid[number]) if number < len(grid) else self.first


SEARCHES: dict[str, type[SearchInRange]] = {"bo": BayesianSearch, "random": RandomSearch, "grid": GridSearch}


def _fusion(size: float, halvings: float) -> Fusion:
    return Fusion(bucket_mb=2.0**size, edge_mb=2.0 ** (size - halvings))


#: A trial ends after so few steps if they are longer than those of the best one by this factor.
FEW_STEPS, CLEARLY_WORSE = 3, 1.1

#: Steps of a trial where a few sizes are compared.
COMPARED_STEPS = 5

log = logging.getLogger(__name__)


class FusionTuner:
    """Finds bucket sizes: measures steps with one after the other, of a search or a simulation, and keeps the best.

    A trial measures the time from one step to the next on rank 0, which is that of all ranks, by the clock of its
    device: the host may be ahead of it. Rank 0 chooses the next size, and announces the change with the flags of a
    step. All ranks change after the next backward pass, in which no reduce-scatter starts.
    """

    def __init__(self, config: DeARConfig, buckets: FusedBuckets, transport: Transport) -> None:
        self._config, self._fused, self._transport = config, buckets, transport
        self.fusion = config.first_fusion()  # of the present buckets
        self.finished = True  # also if there is no search
        self.change_due = False  # whether the buckets change after the next backward pass; the same on all ranks
        self.trials: list[Trial] = []
        self._search: FusionSearch | None = None  # on rank 0
        self._compares = False  # whether it has what the simulation has found
        self._sizes: list[int] = []  # bytes of the parameters of each kind
        self._clock = Clock(transport.device)
        self._ends: list[Moment] = []  # of the steps of this trial, and of the one before
        self._worker: Worker | None = None
        self._decision: Promise[tuple[list[Trial], Fusion, bool]] | None = None

    def begin(self, parameters: Sequence[NamedParameter]) -> None:
        """Starts to look for sizes, unless that has begun for as many bytes; a collective call.

        The first sizes stay with deterministic algorithms, since the order of summation depends on the buckets; with
        copies within a replica, which must have one order; in a search, if all parameters fit into the smallest bucket,
        by default 1 MiB, or if rank 0 lacks the package for it, which is logged.
        """
        sizes = [sum(map(num_bytes, kind)) for kind in of_one_kind(parameters)]
        search = SEARCHES.get(self._config.fusion)
        if (search is None and not self._config.chooses_fusion) or sizes == self._sizes:
            return
        self._sizes, self.trials = sizes, []
        self._search, self._compares = None, False
        self._begin_trial(self._config.first_fusion())
        missing = missing_extra("tune", "fusion='bo'") if self._config.fusion == "bo" else None
        everyone = self._transport.gather_objects((torch.are_deterministic_algorithms_enabled(), missing))
        deterministic = any(wanted for wanted, _ in everyone) or any(copies_of(p.tensor) > 1 for p in parameters)
        self.finished = self._transport.world_size == 1 or deterministic
        if search is None:
            return
        smallest, largest = self._config.search_mb or SEARCH_MB
        largest = min(largest, max(sizes) / MIB)
        self.finished |= largest <= smallest
        if not self.finished and (message := everyone[0][1]):
            self.finished = True
            if self._transport.rank == 0:
                log.warning(f"{message}. Without it the buckets keep the size of bucket_mb={self.fusion.bucket_mb}.")
        if self.finished:
            return
        if self._transport.rank == 0:
            if self._config.search_mb is None:
                smallest = min(smallest, largest / MOST_BUCKETS)
            self._search = search(self.fusion, smallest, largest, self._config.max_trials)

    def end_of_trial(self) -> bool:
        """Returns whether this is rank 0 and it has chosen the next size, on a thread, while training continues."""
        if self.finished or self._search is None:
            return False
        if self._decision is None and self._seen_enough():
            self._decision = Promise()
            trials = [*self.trials, Trial(self.fusion, self._median())]
            decide = functools.partial(self._decide, self._search, trials)
            self._worker = self._worker or Worker("pipesync-dear-tuner")
            self._worker.submit(functools.partial(self._decision.run, decide))
        return self._decision is not None and self._decision.done

    def note_step(self) -> None:
        """Records the end of a step of a trial, on rank 0."""
        if not self.finished and self._search is not None:
            self._ends.append(self._clock.now())

    def restart_trial(self) -> None:
        """Drops the steps of the present trial, since the next ones take another time with the same buckets."""
        if self._decision is None:
            self._ends = []

    @property
    def wants_candidates(self) -> bool:
        """Whether :meth:`compare` is to be called, now that a step was measured; the same on all ranks."""
        return self._config.chooses_fusion and not (self.finished or self._compares)

    def compare(self, candidates: Sequence[Fusion]) -> None:
        """Begins to compare the first sizes with ``candidates``."""
        self._compares = True
        if self._transport.rank == 0:
            self._search = Comparison(candidates)

    def change(self) -> bool:
        """Begins the next trial, or ends the search, and returns whether the buckets change; a collective call."""
        decision = (self.trials, self.fusion, self.finished) if self._decision is None else self._decision.wait()
        self.trials, fusion, self.finished = self._transport.broadcast_object(decision)
        self._begin_trial(fusion)
        if self._transport.rank == 0:
            self._report()
        if self.finished:
            self.close(timeout_s=1.0)
        return self._fused.differs_from(fusion)

    def state_dict(self) -> dict[str, Any]:
        """Returns the measurements, the same on all ranks."""
        trials = [(trial.fusion.bucket_mb, trial.fusion.edge_mb, trial.seconds) for trial in self.trials]
        return {"trials": trials, "fusion": (self.fusion.bucket_mb, self.fusion.edge_mb), "finished": self.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes the search of :meth:`state_dict`, if there is one now; buckets of another fusion change next."""
        if not self.finished and state["trials"]:
            self.trials = [Trial(Fusion(*sizes), float(seconds)) for *sizes, seconds in state["trials"]]
            fusion, self.finished = Fusion(*state["fusion"]), bool(state["finished"])
            self._begin_trial(fusion)
        self.change_due = bool(self._fused.buckets) and self._fused.differs_from(self.fusion)

    def close(self, timeout_s: float) -> None:
        if self._worker is not None:
            self._worker.close(timeout_s)
            self._worker = None

    def _seen_enough(self) -> bool:
        num_steps = len(self._ends) - 1
        if num_steps <= FEW_STEPS:
            return False
        best = fastest(self.trials).seconds if self.trials else math.inf
        clearly_worse = self._median() > CLEARLY_WORSE * best
        return clearly_worse or num_steps >= (COMPARED_STEPS if self._compares else self._config.trial_steps)

    def _decide(self, search: FusionSearch, trials: list[Trial]) -> tuple[list[Trial], Fusion, bool]:
        """Returns all trials so far, the next fusion, and whether that is final."""
        try:
            measured = {self._fused.names(known.fusion): known.seconds for known in trials}
            while not search.converged(trials):
                fusion = search.suggest(trials)
                if (seconds := measured.get(self._fused.names(fusion))) is None:
                    return trials, fusion, False
                trials.append(Trial(fusion, seconds))  # another size, the same buckets
        except Exception as error:  # training continues without the search
            log.warning(f"The search for DeAR's bucket size ends early: {type(error).__name__}: {error}")
        return trials, fastest(trials).fusion, True

    def _begin_trial(self, fusion: Fusion) -> None:
        self.fusion, self._ends, self.change_due = fusion, [], False
        self._decision = None

    def _median(self) -> float:
        """Returns the median seconds of a step, without the first step of a trial, which allocates buffers."""
        return median(self._clock.seconds_between(*pair) for pair in pairwise(self._ends[1:]))

    def _report(self) -> None:
        if self.finished and self.trials:
            first, best = self.trials[0], fastest(self.trials)
            edge_mb = best.fusion.edge_mb or best.fusion.bucket_mb
            log.info(
                f"DeAR fuses up to {best.fusion.bucket_mb:.1f} MiB, at the ends {edge_mb:.1f}: {best.seconds:.3f} s a "
                f"step. It was {first.seconds:.3f} s with {first.fusion.bucket_mb:.1f} MiB; {len(self.trials)} trials."
            )
