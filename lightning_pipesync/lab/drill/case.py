"""Cases of a drill: which training suffers which faults, drawn from one number each."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

from lightning_pipesync.lab.bench.method_candidate import lab_of
from lightning_pipesync.lab.drill.faults import FAULTS, Fault
from lightning_pipesync.lab.drill.phases import STEPS, WITHIN_STEPS
from lightning_pipesync.training.registry import METHODS

#: By name, the extra that installs it.
FRAMEWORKS = {"plain": None, "lightning": "lightning", "fabric": "lightning", "accelerate": "accelerate"}

#: How often a job has so many ranks, and how often a second fault strikes another rank, if there are three or more.
WORLD_SIZES = {2: 5, 3: 3, 4: 2}
SECOND_FAULT = 0.25

#: The seeds of one schedule are from this many times its own seed on.
SEEDS_OF_SCHEDULE = 1_000_000


@dataclass(frozen=True)
class Strike:
    """One fault in a training: which, on which rank, and when."""

    fault: str  # a key of FAULTS
    rank: int
    phase: str
    step: int = 0  # the earliest, from 0
    message: int = 0  # within a collective: so many messages of the rank are sent before

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]

    def __str__(self) -> str:
        within = f" of step {self.step}" if self.phase in WITHIN_STEPS else ""
        return f"{self.fault} on rank {self.rank}, {self.phase}{within}"


@dataclass(frozen=True)
class Case:
    """A training, and the faults that strike it; the same for the same seed and the same methods."""

    seed: int
    method: str
    variant: int  # of the settings that the method declares
    framework: str
    ranks: int
    strikes: tuple[Strike, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(lab_of(self.method).drilled[self.variant].settings)

    @property
    def repeatable(self) -> bool:
        return lab_of(self.method).drilled[self.variant].repeatable

    @property
    def fault(self) -> str:
        return " + ".join(strike.fault for strike in self.strikes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        return cls(**{**values, "strikes": tuple(Strike(**strike) for strike in values["strikes"])})


def frameworks_of(method: str) -> list[str]:
    """Returns the frameworks that have a method: Fabric has no pipelines."""
    return [name for name in FRAMEWORKS if not (name == "fabric" and METHODS[method].makes_passes)]


def draw(seed: int) -> Case:
    """Returns the case of a seed."""
    choose = random.Random(seed)
    method = choose.choice(sorted(METHODS))
    framework = choose.choice(frameworks_of(method))
    variant = choose.randrange(len(lab_of(method).drilled))
    first = FAULTS[choose.choice(list(FAULTS))]
    sizes = [size for size in WORLD_SIZES if first.divides_evenly is False or size % 2 == 0]
    ranks = choose.choices(sizes, [WORLD_SIZES[size] for size in sizes])[0]
    strikes = [_strike(choose, first, method, framework, range(ranks))]
    if ranks > 2 and first.combines and choose.random() < SECOND_FAULT:
        second = FAULTS[choose.choice([name for name, fault in FAULTS.items() if fault.combines])]
        others = [rank for rank in range(ranks) if rank != strikes[0].rank]
        if not second.by_writer:
            strikes.append(_strike(choose, second, method, framework, others))
    return Case(seed, method, variant, framework, ranks, tuple(strikes))


def schedule(
    seed: int, number: int, methods: Collection[str], frameworks: Collection[str], faults: Collection[str]
) -> list[Case]:
    """Returns the first cases of a schedule that are of these methods and frameworks, with these faults only."""

    def fitting() -> Iterator[Case]:
        for case in map(draw, count(seed * SEEDS_OF_SCHEDULE)):
            suits = all(strike.fault in faults for strike in case.strikes)
            if suits and case.method in methods and case.framework in frameworks:
                yield case

    return list(islice(fitting(), number))


def phases_of(fault: Fault, method: str, framework: str) -> list[str]:
    """Returns the phases in which a fault can strike: a Trainer does not validate with a pipeline here."""
    validates = framework != "lightning" or not METHODS[method].makes_passes
    return [phase for phase in fault.phases if validates or phase != "flush"]


def _strike(choose: random.Random, fault: Fault, method: str, framework: str, ranks: Collection[int]) -> Strike:
    # In a plain loop each rank writes a checkpoint of its own; a framework's are written by rank 0, at least in part.
    writes_alone = fault.by_writer and framework != "plain"
    rank = 0 if writes_alone else choose.choice(list(ranks))
    phase = choose.choice(phases_of(fault, method, framework))
    return Strike(fault.name, rank, phase, choose.randrange(1, STEPS - 2), choose.randrange(3))
