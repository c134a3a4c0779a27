"""What no method can train is refused on every rank, before training, by a message that names what is wrong."""

from __future__ import annotations

import os
from functools import cache, partial

import pytest

from lightning_pipesync.training import registry
from tests.conformance.cases import PAIRS
from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.training import Options
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised

#: What is wrong, and the words that name it; a method's own wrong setting has words of its own.
WORDS = {
    "wrong setting": (),
    "unknown setting": ("no_such_setting",),
    "different settings": ("timeout_s: rank 0 has 70.0, rank 1 has 71.0",),
    "different models": ("(10, 6)", "(11, 6)"),
    "different optimizers": ("class of the optimizer", "SGD", "AdamW"),
    "different learning rates": ("lr of group 0 of SGD", "0.05", "0.1"),
    "LBFGS": ("LBFGS",),
    "ZeroRedundancyOptimizer": ("ZeroRedundancyOptimizer", "pass the optimizer that it wraps"),
}

OF_OPTIMIZERS = ("different optimizers", "different learning rates")

Outcome = tuple[str, str] | None


def refused(framework: str, name: str, kind: str) -> Outcome:
    method, rank = METHODS[name], int(os.environ["RANK"])
    settings = method.typical[0]
    given, options = {
        "wrong setting": ({**settings, method.wrong[0]: method.wrong[1]}, Options()),
        "unknown setting": ({**settings, "no_such_setting": 1}, Options()),
        "different settings": ({**settings, "timeout_s": 70.0 + rank}, Options()),
        "different models": (settings, Options(hidden=10 + rank)),
        "different optimizers": (settings, Options("adamw" if rank else "sgd")),
        "different learning rates": (settings, Options(lr_factor=1.0 + rank)),
        "LBFGS": (settings, Options("lbfgs")),
        "ZeroRedundancyOptimizer": (settings, Options("zero")),
    }[kind]
    return raised(lambda: train(framework, method, given, options))


def kinds_of(framework: str, name: str) -> list[str]:
    """Returns what can be wrong: each rank of a pipeline may choose an optimizer where it makes that of its stage."""
    alone = METHODS[name].pipeline and framework != "lightning"
    return [kind for kind in WORDS if not (alone and kind in OF_OPTIMIZERS)]


@cache
def all_refused(framework: str, name: str) -> Outcomes:
    cases = {kind: partial(refused, framework, name, kind) for kind in kinds_of(framework, name)}
    return launch_cases(cases, 2, init=framework == "plain")


def test_every_registered_method_is_in_the_table() -> None:
    assert set(registry.METHODS) == set(METHODS)


@pytest.mark.parametrize(("framework", "name", "kind"), [(*pair, kind) for pair in PAIRS for kind in kinds_of(*pair)])
def test_is_refused_by_name(framework: str, name: str, kind: str) -> None:
    setting, value = METHODS[name].wrong
    words = WORDS[kind] or (setting, repr(value))
    for outcome in all_refused(framework, name)[kind]:
        assert outcome is not None
        # A setting that a constructor does not have is Python's own error where it has them as arguments.
        assert outcome[0] == "ValueError" or (outcome[0], kind) == ("TypeError", "unknown setting"), outcome
        assert all(word in outcome[1] for word in words), outcome
