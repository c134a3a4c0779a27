"""Two replicas of two ranks, among which FSDP2 shards the network, by every method on every framework.

A plain loop's exact settings are FSDP2 on a mesh of two dimensions; typical settings on a framework are the plain loop;
runs can be resumed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tests.conformance.cases import CASES, Tier
from tests.conformance.loops import run_loop
from tests.conformance.methods import FRAMEWORKS, METHODS, Method
from tests.conformance.runners import SHARDED_LOOPS, train
from tests.conformance.shards import ShardedPlainLoop
from tests.conformance.table import assert_equal, exact_settings, folder
from tests.conformance.trainer import saved_weights
from tests.conformance.training import BATCHES, EPOCHS, Checkpoint, Options, Result, flat, network
from tests.support.case_table import Outcomes
from tests.support.shards import launch_sharded

NAMES = [name for name, method in METHODS.items() if method.sharded]
#: The cases of the exact settings.
EXACT = ("sgd", "accumulation, clip norm", "adamw, accumulation, clip value", "several optimizers", "bf16-mixed")
#: The case of the typical settings that each framework trains beside a plain loop.
BESIDE = {
    "lightning": "accumulation, clip norm",
    "fabric": "several optimizers",
    "accelerate": "sgd",
}
SAVED_EVERY = 3


def in_replicas(options: Options) -> Options:
    return replace(options, ranks=4, ranks_per_replica=2)


RESUMED = in_replicas(Options("adamw", dropout=0.2))


def exact_rows(tier: Tier) -> list[tuple[str, str, str]]:
    """Returns framework, method and case of each training that is FSDP2's; before each commit each method has one."""
    turns = {name: EXACT[number % len(EXACT)] for number, name in enumerate(NAMES)}
    plain = [("plain", name, case) for name in NAMES for case in EXACT if (case == turns[name]) == (tier == "quick")]
    return plain + [(framework, "dear", case) for framework, case in BESIDE.items() if tier == "quick"]


def typical_rows() -> list[tuple[str, str]]:
    """Returns framework and method of each training in typical settings beside a plain loop."""
    # Accelerate shards the model as a whole, the plain loop layer by layer: with int8 their weights differ.
    return [(framework, name) for framework in BESIDE for name in NAMES if (framework, name) != ("accelerate", "dear")]


def resumed_rows(tier: Tier) -> list[tuple[str, str, int]]:
    """Returns framework, method, and the index of typical settings in which a run is resumed."""
    rows = {
        (framework, name, index): index == METHODS[name].sharded[0] and (framework == "plain" or name == "dear")
        for framework in FRAMEWORKS
        for name in NAMES
        for number, index in enumerate(METHODS[name].sharded)
        if framework == "plain" or number == FRAMEWORKS.index(framework) % len(METHODS[name].sharded)
    }
    return [row for row, is_quick in rows.items() if is_quick == (tier == "quick")]


@cache
def outcomes(framework: str, tier: Tier) -> Outcomes:
    """Trains all rows of a framework and a tier."""
    cases: dict[Any, Any] = {}
    for _, name, case in [row for row in exact_rows(tier) if row[0] == framework]:
        exact = exact_settings(framework, METHODS[name])
        cases[name, case] = partial(train_beside, framework, METHODS[name], exact, case, by_fsdp=True)
    for _, name in [row for row in typical_rows() if row[0] == framework and tier == "nightly"]:
        method = METHODS[name]
        typical = method.typical[method.sharded[0]]
        cases[name] = partial(train_beside, framework, method, typical, BESIDE[framework], by_fsdp=False)
    for _, name, index in [row for row in resumed_rows(tier) if row[0] == framework]:
        run = partial(train, framework, METHODS[name], METHODS[name].typical[index], RESUMED)
        saved, again = (Checkpoint(path(framework, name, index, which), SAVED_EVERY) for which in ("", ", again"))
        cases[name, index, "whole"] = partial(run, save=saved)
        cases[name, index, "resumed"] = partial(run, save=again, resume=saved.first)
    return launch_sharded(cases, 4, init=framework == "plain")


def path(framework: str, name: str, index: int, which: str = "") -> Path:
    return Path(folder().name) / f"{framework} {name} {index}{which}"


def train_beside(
    framework: str, method: Method, settings: dict[str, Any], case: str, by_fsdp: bool
) -> tuple[Result, Result]:
    """Returns what comes of a training, and on the same batches of FSDP2 in both dimensions, or of a plain loop."""
    options = in_replicas(CASES[case])
    result = train(framework, method, settings, options)
    other, of_method = (None, {}) if by_fsdp else (method, settings)
    return result, run_loop(ShardedPlainLoop, other, of_method, options, result.seen)


def assert_is_fsdp(tier: Tier, framework: str, name: str, case: str) -> None:
    """Bit for bit, but for what is clipped by a norm, which is summed in another order."""
    for actual, expected in outcomes(framework, tier)[name, case]:
        assert actual.seen == expected.seen
        if CASES[case].clip_norm is None:
            assert_equal(actual.weights, expected.weights)
        else:
            torch.testing.assert_close(actual.weights, expected.weights)
            torch.testing.assert_close(actual.norms, expected.norms if actual.norms else [])


def assert_is_plain_loop(framework: str, name: str) -> None:
    """Bit for bit; all ranks end equal, and the weights have moved."""
    trained = outcomes(framework, "nightly")[name]
    for actual, expected in trained:
        assert_equal(actual.weights, expected.weights)
        assert_equal(actual.weights, trained[0][0].weights)
        assert not torch.equal(actual.weights, flat(network(CASES[BESIDE[framework]])))


def assert_resumes(tier: Tier, framework: str, name: str, index: int) -> None:
    """Bit for bit, from the checkpoint of a whole model; all ranks of all replicas end equal."""
    wholes = outcomes(framework, tier)[name, index, "whole"]
    file = Checkpoint(path(framework, name, index), SAVED_EVERY).first.path
    saved = saved_weights(file) if framework == "lightning" else SHARDED_LOOPS[framework].saved_weights(file)
    for whole, resumed in zip(wholes, outcomes(framework, tier)[name, index, "resumed"], strict=True):
        assert len(whole.seen) == EPOCHS * BATCHES
        assert resumed.seen == whole.seen[SAVED_EVERY:]
        assert saved.shape == whole.weights.shape
        if name == "dear":  # others load the weights of each replica, too
            assert_equal(resumed.loaded, saved)
        assert_equal(resumed.weights, whole.weights)
        assert_equal(whole.weights, wholes[0].weights)
        assert not torch.equal(whole.weights, flat(network(RESUMED)))
