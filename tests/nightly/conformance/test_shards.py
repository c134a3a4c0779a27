"""Two replicas of two ranks, among which FSDP2 shards the network, by every method on every framework."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.conformance.cases import CASES
from tests.conformance.loops import run_loop
from tests.conformance.methods import METHODS, Method
from tests.conformance.runners import train
from tests.conformance.shards import ShardedPlainLoop
from tests.conformance.training import BATCHES, EPOCHS, Checkpoint, Options, Result, flat, network
from tests.nightly.conformance.test_training import assert_equal, exact_settings
from tests.support.case_table import Outcomes, launch_cases

NAMES = [name for name, method in METHODS.items() if method.sharded]
#: The cases of the exact settings that each framework has.
OF_FRAMEWORK = {
    "plain": ("sgd", "accumulation, clip norm", "adamw, accumulation, clip value", "several optimizers", "bf16-mixed"),
    "lightning": ("sgd", "accumulation, clip norm"),
    "fabric": ("adamw, accumulation, clip value", "several optimizers"),
    "accelerate": ("sgd", "accumulation, clip norm"),
}
EXACT = [(framework, name, case) for framework in OF_FRAMEWORK for name in NAMES for case in OF_FRAMEWORK[framework]]
TYPICAL = [(framework, name, index) for framework in OF_FRAMEWORK for name in NAMES for index in METHODS[name].sharded]
SAVED_EVERY = 3


def in_replicas(options: Options) -> Options:
    return replace(options, ranks=4, ranks_per_replica=2)


RESUMED = in_replicas(Options("adamw", dropout=0.2))


@cache
def folder() -> TemporaryDirectory[str]:
    """Returns where checkpoints are, until this process ends."""
    return TemporaryDirectory()


@cache
def outcomes(framework: str) -> Outcomes:
    """Trains by all methods, on ranks that are launched once."""
    cases: dict[Any, Any] = {}
    for name in NAMES:
        method = METHODS[name]
        exact = exact_settings(framework, method)
        for case in OF_FRAMEWORK[framework]:
            cases[name, case] = partial(train_beside_fsdp, framework, method, exact, case)
        for index in method.sharded:
            run = partial(train, framework, method, method.typical[index], RESUMED)
            saved, again = (Checkpoint(path(framework, name, index, which), SAVED_EVERY) for which in ("", ", again"))
            cases[name, index, "whole"] = partial(run, save=saved)
            cases[name, index, "resumed"] = partial(run, save=again, resume=saved.first)
    return launch_cases(cases, 4, init=framework == "plain")


def path(framework: str, name: str, index: int, which: str = "") -> Path:
    return Path(folder().name) / f"{framework} {name} {index}{which}"


#: On a rank: what comes of a case by FSDP2 on both dimensions of the mesh.
_by_fsdp: dict[str, Result] = {}


def train_beside_fsdp(framework: str, method: Method, settings: dict[str, Any], case: str) -> tuple[Result, Result]:
    """Returns what comes of the training, and of the case by FSDP2, on the batches of the method that was first."""
    options = in_replicas(CASES[case])
    result = train(framework, method, settings, options)
    if case not in _by_fsdp:
        _by_fsdp[case] = run_loop(ShardedPlainLoop, None, {}, options, result.seen)
    return result, _by_fsdp[case]


@pytest.mark.parametrize(("framework", "name", "case"), EXACT)
def test_exact_settings_are_fsdp2_on_a_mesh_of_two_dimensions(framework: str, name: str, case: str) -> None:
    """Bit for bit, but for what is clipped by a norm, which is summed in another order."""
    for actual, expected in outcomes(framework)[name, case]:
        assert actual.seen == expected.seen
        if CASES[case].clip_norm is None:
            assert_equal(actual.weights, expected.weights)
        else:
            torch.testing.assert_close(actual.weights, expected.weights)
            torch.testing.assert_close(actual.norms, expected.norms if actual.norms else [])


@pytest.mark.parametrize(("framework", "name", "index"), TYPICAL)
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str, index: int) -> None:
    """Bit for bit, and all ranks of all replicas end equal."""
    wholes = outcomes(framework)[name, index, "whole"]
    for whole, resumed in zip(wholes, outcomes(framework)[name, index, "resumed"], strict=True):
        assert len(whole.seen) == EPOCHS * BATCHES
        assert resumed.seen == whole.seen[SAVED_EVERY:]
        assert_equal(resumed.weights, whole.weights)
        assert_equal(whole.weights, wholes[0].weights)
        assert not torch.equal(whole.weights, flat(network(RESUMED)))
