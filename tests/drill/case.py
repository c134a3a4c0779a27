"""Cases of a drill: which training suffers which faults, drawn from one number each."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

from lightning_pipesync.training.registry import METHODS
from tests.drill.faults import FAULTS, JOBS, RANKS, SUBJECTS, Fault
from tests.drill.phases import PHASES, PHASES_OF_JOBS, STEPS, WITHIN_STEPS
from tests.drill.settings import Drilled, of_jobs, of_ranks

FRAMEWORKS = ("plain", "lightning", "fabric", "accelerate")

#: Those in which replicas that are jobs of their own are drilled.
FRAMEWORKS_OF_JOBS = ("plain", "lightning", "fabric")

#: How often a job has so many ranks, and how often a second fault strikes another rank, if there are three or more.
WORLD_SIZES = {2: 5, 3: 3, 4: 2}
SECOND_FAULT = 0.25
#: How often so many jobs train together, and how often one that has ended by a fault starts again.
NUM_JOBS = {2: 3, 3: 4, 4: 3}
STARTS_AGAIN = 0.5

#: The seeds of one schedule are from this many times its own seed on, in the upper half those of jobs.
SEEDS_OF_SCHEDULE = 1_000_000
#: Of so many cases of a schedule the last one is of jobs.
EVERY = 5


@dataclass(frozen=True)
class Strike:
    """One fault in a training: which, on which rank, and when."""

    fault: str  # a key of FAULTS
    rank: int
    phase: str
    step: int = 0  # the earliest, from 0
    message: int = 0  # within a collective: so many messages of the rank are sent before
    restarts: bool = False  # whether the job that it ends starts again

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]

    def __str__(self) -> str:
        within = f" of step {self.step}" if self.phase in WITHIN_STEPS else ""
        again = ", which starts again" if self.restarts else ""
        return f"{self.fault} on rank {self.rank}{again}, {self.phase}{within}"


@dataclass(frozen=True)
class Case:
    """A training, and the faults that strike it; the same for the same seed and the same methods."""

    seed: int
    method: str
    variant: int  # of the settings that the method declares
    framework: str
    ranks: int  # of jobs their number
    strikes: tuple[Strike, ...]
    subject: str = RANKS  # one of SUBJECTS

    @property
    def drilled(self) -> Drilled:
        return (of_jobs if self.subject == JOBS else of_ranks)(self.method)[self.variant]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the method: those of its variant."""
        return self.drilled.settings

    @property
    def repeatable(self) -> bool:
        return self.drilled.repeatable

    @property
    def fault(self) -> str:
        return " + ".join(strike.fault for strike in self.strikes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        return cls(**{**values, "strikes": tuple(Strike(**strike) for strike in values["strikes"])})


def methods() -> list[str]:
    """Returns all methods that are registered, but for an example of the conformance suite."""
    return [name for name in sorted(METHODS) if not METHODS[name].__module__.startswith("tests.")]


def frameworks_of(method: str, subject: str = RANKS) -> list[str]:
    """Returns the frameworks that have a method: Fabric has no pipelines."""
    if subject == JOBS:
        return list(FRAMEWORKS_OF_JOBS) if of_jobs(method) else []
    return [name for name in FRAMEWORKS if not (name == "fabric" and METHODS[method].makes_passes)]


def draw(seed: int) -> Case:
    """Returns the case of a seed."""
    return _draw_ranks(seed) if seed % SEEDS_OF_SCHEDULE < SEEDS_OF_SCHEDULE // 2 else _draw_jobs(seed)


def _draw_ranks(seed: int) -> Case:
    choose = random.Random(seed)
    method = choose.choice(methods())
    framework = choose.choice(frameworks_of(method))
    variant = choose.randrange(len(of_ranks(method)))
    first = FAULTS[choose.choice([name for name, fault in FAULTS.items() if RANKS in fault.subjects])]
    sizes = [size for size in WORLD_SIZES if first.divides_evenly is False or size % 2 == 0]
    ranks = choose.choices(sizes, [WORLD_SIZES[size] for size in sizes])[0]
    strikes = [_strike(choose, first, framework, range(ranks))]
    if ranks > 2 and first.combines and choose.random() < SECOND_FAULT:
        second = FAULTS[choose.choice([*_second_faults(RANKS)])]
        others = [rank for rank in range(ranks) if rank != strikes[0].rank]
        if not second.by_writer:
            strikes.append(_strike(choose, second, framework, others))
    return Case(seed, method, variant, framework, ranks, tuple(strikes))


def _draw_jobs(seed: int) -> Case:
    choose = random.Random(seed)
    method = choose.choice([name for name in methods() if frameworks_of(name, JOBS)])
    framework = choose.choice(frameworks_of(method, JOBS))
    variant = choose.randrange(len(of_jobs(method)))
    first = FAULTS[choose.choice([name for name, fault in FAULTS.items() if JOBS in fault.subjects])]
    jobs = choose.choices(list(NUM_JOBS), list(NUM_JOBS.values()))[0]
    strikes = [_strike_job(choose, first, range(jobs))]
    if jobs > 2 and first.combines and choose.random() < SECOND_FAULT:
        second = FAULTS[choose.choice([*_second_faults(JOBS)])]
        strikes.append(_strike_job(choose, second, [job for job in range(jobs) if job != strikes[0].rank]))
    return Case(seed, method, variant, framework, jobs, tuple(strikes), JOBS)


def _second_faults(subject: str) -> Iterator[str]:
    return (name for name, fault in FAULTS.items() if fault.combines and subject in fault.subjects)


def schedule(
    seed: int,
    number: int,
    methods: Collection[str],
    frameworks: Collection[str],
    faults: Collection[str],
    subjects: Collection[str] = SUBJECTS,
) -> list[Case]:
    """Returns the first cases of a schedule that are of these methods, frameworks and subjects, with these faults."""
    first = seed * SEEDS_OF_SCHEDULE

    def fitting(first: int, subject: str) -> Iterator[Case]:
        has_some = subject in subjects and any(subject in FAULTS[name].subjects for name in faults)
        has_some &= any(set(frameworks).intersection(frameworks_of(method, subject)) for method in methods)
        for case in map(draw, count(first) if has_some else ()):
            suits = all(strike.fault in faults for strike in case.strikes)
            if suits and case.method in methods and case.framework in frameworks:
                yield case

    of_ranks, of_jobs = fitting(first, RANKS), fitting(first + SEEDS_OF_SCHEDULE // 2, JOBS)

    def mixed() -> Iterator[Case]:
        for index in count():
            turn = (of_jobs, of_ranks) if index % EVERY == EVERY - 1 else (of_ranks, of_jobs)
            case = next(turn[0], None) or next(turn[1], None)
            assert case is not None, "nothing fits"
            yield case

    return list(islice(mixed(), number))


def _strike(choose: random.Random, fault: Fault, framework: str, ranks: Collection[int]) -> Strike:
    # In a plain loop each rank writes a checkpoint of its own; a framework's are written by rank 0, at least in part.
    writes_alone = fault.by_writer and framework != "plain"
    rank = 0 if writes_alone else choose.choice(list(ranks))
    phase = choose.choice(fault.phases)
    return Strike(fault.name, rank, phase, choose.randrange(1, STEPS - 2), choose.randrange(3))


def _strike_job(choose: random.Random, fault: Fault, jobs: Collection[int]) -> Strike:
    phase = choose.choice(PHASES_OF_JOBS if fault.phases == PHASES else fault.phases)
    job, step, message = choose.choice(list(jobs)), choose.randrange(1, STEPS - 2), choose.randrange(3)
    return Strike(fault.name, job, phase, step, message, fault.ends_job and choose.random() < STARTS_AGAIN)
