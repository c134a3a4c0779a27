"""Every method on every framework: exact settings are DDP, typical ones a plain loop, and runs can be resumed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.conformance.cases import CASES, PAIRS, Tier, case_turns, cases_of
from tests.conformance.methods import METHODS, Method
from tests.conformance.runners import saved_weights, train, train_plainly
from tests.conformance.training import BATCHES, EPOCHS, Checkpoint, Options, Result, flat, network
from tests.support.case_table import Outcomes, launch_cases

#: Saved within an epoch, with random numbers to be drawn.
RESUMED, SAVED_EVERY = Options("adamw", dropout=0.2), 3
#: The same with a loss scale that has changed by then, where a framework saves it.
SCALED = replace(RESUMED, precision="16-mixed", loss_scale=2.0**20)
#: Loaded by another method: at the end of an epoch, from where DDP's Trainer, too, continues.
EXCHANGED = Options("adamw")


@cache
def folder() -> TemporaryDirectory[str]:
    """Returns where checkpoints are, until this process ends."""
    return TemporaryDirectory()


def exact_settings(framework: str, method: Method) -> dict[str, Any]:
    return {**method.exact, **(method.exact_in_trainer if framework == "lightning" else {})}


def exact_rows(tier: Tier) -> list[tuple[str, str, str]]:
    """Returns framework, method and case of each training that is DDP's."""
    return [
        (*pair, case)
        for pair in PAIRS
        for case in cases_of(pair[0], METHODS[pair[1]])
        if (case == case_turns(pair[0])[pair[1]].exact) == (tier == "quick")
    ]


def typical_rows(tier: Tier) -> list[tuple[str, str, int, str]]:
    """Returns framework, method, the index of typical settings, and case."""
    return [
        (*pair, *typical)
        for pair in PAIRS
        for typical in typical_of(pair[0], METHODS[pair[1]])
        if (typical == case_turns(pair[0])[pair[1]].typical) == (tier == "quick")
    ]


def resumed_rows(tier: Tier) -> list[tuple[str, str, int]]:
    """Returns framework, method, and the index of typical settings in which a run is resumed."""
    return [
        (*pair, index)
        for pair in PAIRS
        for index in range(len(METHODS[pair[1]].typical))
        if (index == case_turns(pair[0])[pair[1]].resumed) == (tier == "quick")
    ]


def exchange_rows() -> list[tuple[str, str]]:
    return [pair for pair in PAIRS if exchanges(pair[0], METHODS[pair[1]])]


@cache
def by_ddp(framework: str, tier: Tier) -> Outcomes:
    directory = Path(folder().name) / framework
    directory.mkdir(exist_ok=True)
    cases: dict[Any, Any] = {
        case: partial(train, framework, None, {}, CASES[case])
        for case in dict.fromkeys(case for of, _, case in exact_rows(tier) if of == framework)
        if case in cases_of(framework, None)
    }
    if tier == "quick":
        cases["saved"] = partial(train, framework, None, {}, EXCHANGED, save=Checkpoint(directory / "ddp", BATCHES))
    return launch_cases(cases, 2, init=framework == "plain")


@cache
def by_method(framework: str, name: str, tier: Tier) -> Outcomes:
    """Trains all rows of a tier: on the framework, and on the same batches in a plain loop."""
    by_ddp(framework, tier)  # a checkpoint of which is loaded
    directory, method, cases, pair = Path(folder().name) / framework, METHODS[name], {}, (framework, name)
    exact = exact_settings(framework, method)
    kinds = [("exact", case) for *of, case in exact_rows(tier) if (*of,) == pair]
    kinds += [(index, case) for *of, index, case in typical_rows(tier) if (*of,) == pair]
    for kind, case in kinds:
        settings = exact if kind == "exact" else method.typical[kind]
        also_plainly = replays(framework, method, kind, CASES[case])
        cases[kind, case] = partial(train_twice, framework, method, settings, CASES[case], also_plainly)
    for index in [index for *of, index in resumed_rows(tier) if (*of,) == pair]:
        scaled = framework in ("lightning", "fabric") and not method.pipeline
        run = partial(train, framework, method, method.typical[index], SCALED if scaled else RESUMED)
        saved, again = (Checkpoint(directory / f"{name} {index}{which}", SAVED_EVERY) for which in ("", ", again"))
        if saving_is_compared(method, index):
            cases["never saved", index] = run
        cases["whole", index] = partial(run, save=saved)
        cases["resumed", index] = partial(run, save=again, resume=saved.first)
    if tier == "quick" and exchanges(framework, method):
        for_ddp, of_ddp = (Checkpoint(directory / which, BATCHES) for which in (f"{name} for ddp", "ddp"))
        cases["saved"] = partial(train, framework, method, exact, EXCHANGED, save=for_ddp)
        cases["to ddp"] = partial(train, framework, None, {}, EXCHANGED, resume=for_ddp.first)
        cases["from ddp"] = partial(train, framework, method, exact, EXCHANGED, resume=of_ddp.first)
    return launch_cases(cases, 2, init=framework == "plain")


def train_twice(
    framework: str, method: Method, settings: dict[str, Any], options: Options, also_plainly: bool
) -> tuple[Result, Result | None]:
    """Returns what comes of the training, and of the same batches in a plain loop."""
    result = train(framework, method, settings, options)
    return result, train_plainly(method, settings, options, result.seen) if also_plainly else None


def typical_of(framework: str, method: Method) -> list[tuple[int, str]]:
    """Returns the indices of typical settings, and their cases: the first ones have all."""
    others = [(index, "sgd") for index in range(1, len(method.typical))]
    return [(0, case) for case in cases_of(framework, method)] + others


def replays(framework: str, method: Method, kind: str | int, options: Options) -> bool:
    """Returns whether a plain loop trains on the same batches; one of a pipeline is its reference, too."""
    if method.pipeline:
        return True
    return framework != "plain" and kind != "exact" and options.precision != "16-mixed" and options.accumulate < 3


def saving_is_compared(method: Method, index: int) -> bool:
    """Returns whether a run that is never saved is compared with one that is: saving empties a pipeline."""
    return index == 0 and not method.pipeline


def exchanges(framework: str, method: Method) -> bool:
    """Returns whether checkpoints load in DDP: those of a pipeline do in the Trainer, which has the whole optimizer."""
    return framework == "lightning" or not method.pipeline


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(one, other), f"off by {(one - other).abs().max()}"


def assert_is_ddp(tier: Tier, framework: str, name: str, case: str) -> None:
    """Bit for bit, and so is the loss scale; a pipeline is the one whose stages are all in one process."""
    method = METHODS[name]
    trained = by_method(framework, name, tier)["exact", case]
    of_ddp = [None] * 2 if method.pipeline else by_ddp(framework, tier)[case]
    for (actual, in_one_process), by_framework in zip(trained, of_ddp, strict=True):
        expected = by_framework or in_one_process
        assert actual.seen == expected.seen
        assert actual.scale == expected.scale
        if method.sharded_norm and CASES[case].clip_norm:
            torch.testing.assert_close(actual.weights, expected.weights)
        else:
            assert_equal(actual.weights, expected.weights)
        if not method.own_norm:
            rounding = {} if method.sharded_norm else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(actual.norms, expected.norms, equal_nan=True, **rounding)


def assert_is_plain_loop(tier: Tier, framework: str, name: str, index: int, case: str) -> None:
    """Bit for bit, before they are consolidated, too; then the ranks agree, and the weights have moved."""
    trained = by_method(framework, name, tier)[index, case]
    for actual, expected in trained:
        assert actual.weights.isfinite().all()
        assert not torch.equal(actual.weights, flat(network(CASES[case])))
        assert_equal(actual.weights, trained[0][0].weights)
        if replays(framework, METHODS[name], index, CASES[case]):
            assert_equal(actual.weights, expected.weights)
            if actual.own is not None:
                assert actual.norms == expected.norms
                assert_equal(actual.own, expected.own)


def assert_resumes(tier: Tier, framework: str, name: str, index: int) -> None:
    """Bit for bit, from within an epoch, in new objects. Saving changes nothing, except that it empties a pipeline."""
    outcomes = by_method(framework, name, tier)
    wholes = outcomes["whole", index]
    for whole, resumed in zip(wholes, outcomes["resumed", index], strict=True):
        assert len(whole.seen) == EPOCHS * BATCHES
        assert resumed.seen == whole.seen[SAVED_EVERY:]
        assert resumed.scale == whole.scale
        assert_equal(resumed.weights, whole.weights)
        assert_equal(whole.weights, wholes[0].weights)
    if saving_is_compared(METHODS[name], index):
        for whole, never_saved in zip(wholes, outcomes["never saved", index], strict=True):
            assert_equal(never_saved.weights, whole.weights)


def assert_interchanges_with_ddp(framework: str, name: str) -> None:
    """They can be read with ``weights_only=True``; from where one was saved, the other continues, bit for bit."""
    method, directory = METHODS[name], Path(folder().name) / framework
    outcomes, of_ddp = by_method(framework, name, "quick"), by_ddp(framework, "quick")["saved"]
    assert outcomes["saved"]
    for direction, writer, stem in (("to ddp", method, f"{name} for ddp"), ("from ddp", None, "ddp")):
        for continued, whole in zip(outcomes[direction], of_ddp, strict=True):
            assert_equal(continued.loaded, saved_weights(framework, writer, directory / f"{stem}-{BATCHES}"))
            assert_equal(continued.weights, outcomes[direction][0].weights)
            assert not torch.equal(continued.weights, continued.loaded)
            if not method.pipeline:
                assert_equal(continued.weights, whole.weights)
