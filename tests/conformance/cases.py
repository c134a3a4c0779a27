"""The trainings that are compared, by name, and which framework and method has which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from tests.conformance.methods import FRAMEWORKS, METHODS, Method
from tests.conformance.training import Options

CASES = {
    "sgd": Options(),
    "accumulation, clip norm": Options(accumulate=2, clip_norm=0.3),
    "adamw, accumulation, clip value": Options("adamw", accumulate=2, clip_value=0.01),
    "several optimizers": Options(several=True),
    "several optimizers, accumulation, clip norm": Options(several=True, accumulate=2, clip_norm=0.3),
    "muon and adamw": Options("muon", several=True),
    "accumulation of 3 in 4 batches": Options("adamw", accumulate=3, clip_value=0.01),
    "bf16-mixed": Options(precision="bf16-mixed", clip_value=0.01),
    "16-mixed": Options("adamw", precision="16-mixed", clip_norm=0.3, loss_scale=2.0**20),  # which overflows at first
}

#: Each method on each framework that has it.
PAIRS = [
    (framework, method) for framework in FRAMEWORKS for method in METHODS if framework in METHODS[method].frameworks
]


def cases_of(framework: str, method: Method | None) -> list[str]:
    """Returns the names of the cases that the framework has with the method; None: with DistributedDataParallel."""
    pipeline = method is not None and method.pipeline
    has = [name for name, options in CASES.items() if _has(framework, pipeline, options)]
    return [name for name in has if method is None or method.whole_tensors or CASES[name].optimizer != "muon"]


def _has(framework: str, pipeline: bool, options: Options) -> bool:
    if options.precision == "16-mixed":
        return framework != "accelerate" and not pipeline  # Accelerate's scaler needs a GPU
    if options.accumulate == 3:  # a Trainer steps at the end of an epoch
        return framework == "lightning" and not pipeline
    if options.several:  # a pipeline has an optimizer for each stage; a Trainer that steps several does not accumulate
        return not pipeline and (framework != "lightning" or options.accumulate == 1)
    # Of a pipeline Accelerate knows neither the precision nor the clipping by norm, which is a setting.
    return not (pipeline and framework == "accelerate" and (options.precision != "32" or options.clip_norm))


Tier = Literal["quick", "nightly"]


@dataclass(frozen=True)
class Turn:
    """What is tested of a method on a framework before each commit; everything else is in the tests of the night.

    Attributes:
        exact: the case in exact settings.
        typical: the index of typical settings, and the case in them.
        resumed: the index of typical settings in which a run is resumed.
    """

    exact: str
    typical: tuple[int, str]
    resumed: int


@cache
def case_turns(framework: str) -> dict[str, Turn]:
    """Returns the turn of each method: together they have all cases of the framework, and most typical settings."""
    shift, cases = FRAMEWORKS.index(framework), cases_of(framework, None)
    left, turns = cases[2 * shift :] + cases[: 2 * shift], {}

    def next_case(name: str, number: int) -> str:
        own = cases_of(framework, METHODS[name])
        case = next((case for case in left if case in own), own[number % len(own)])
        left[:] = [other for other in left if other != case]
        return case

    for number, name in enumerate((name for of, name in PAIRS if of == framework), shift):
        num_typical = len(METHODS[name].typical)
        index = number % num_typical
        exact = next_case(name, number)
        typical = (index, next_case(name, number) if index == 0 else "sgd")  # the first settings have all cases
        turns[name] = Turn(exact, typical, (number + 1) % num_typical)
    return turns
