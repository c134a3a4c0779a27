"""Every method on every framework: exact settings are DDP, typical ones a plain loop, and runs can be resumed."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.conformance.cases import CASES, PAIRS, cases_of
from tests.conformance.launches import Outcomes, attempt, outcomes_of, result_of
from tests.conformance.methods import METHODS, Method
from tests.conformance.runners import saved_weights, train, train_plainly
from tests.conformance.training import BATCHES, EPOCHS, Checkpoint, Options, Result, flat, network

#: Saved within an epoch, with random numbers to be drawn.
RESUMED, SAVED_EVERY = Options("adamw", dropout=0.2), 3
#: Loaded by another method: at the end of an epoch, from where DDP's Trainer, too, continues.
EXCHANGED = Options("adamw")


@cache
def folder() -> TemporaryDirectory[str]:
    """Returns where checkpoints are, until this process ends."""
    return TemporaryDirectory()


def exact_settings(framework: str, method: Method) -> dict[str, Any]:
    return {**method.exact, **(method.exact_in_trainer if framework == "lightning" else {})}


def train_by_ddp(framework: str, directory: Path) -> dict[str, Any]:
    outcomes = {case: attempt(train, framework, None, {}, CASES[case]) for case in cases_of(framework, None)}
    saved = Checkpoint(directory / "ddp", BATCHES)
    return {**outcomes, "saved": attempt(train, framework, None, {}, EXCHANGED, save=saved)}


def train_by_method(framework: str, name: str, directory: Path) -> dict[Any, Any]:
    """Trains all cases in exact and in typical settings: on the framework, and on the same batches in a plain loop."""
    method, outcomes = METHODS[name], {}
    exact = exact_settings(framework, method)
    trainings = [("exact", case) for case in cases_of(framework, method)] + typical_of(framework, method)
    for kind, case in trainings:
        settings, options = exact if kind == "exact" else method.typical[kind], CASES[case]
        outcomes[kind, case] = result = attempt(train, framework, method, settings, options)
        if isinstance(result, Result) and replays(framework, method, kind, options):
            outcomes[kind, "plain", case] = attempt(train_plainly, method, settings, options, result.seen)
    for index, settings in enumerate(method.typical):
        run = partial(attempt, train, framework, method, settings, RESUMED)
        path = directory / f"{name} {index}"
        again = Checkpoint(directory / f"{name} {index}, again", SAVED_EVERY)
        if saving_is_compared(method, index):
            outcomes["never saved", index] = run()
        outcomes["whole", index] = run(save=Checkpoint(path, SAVED_EVERY))
        outcomes["resumed", index] = run(save=again, resume=Checkpoint(Path(f"{path}-{SAVED_EVERY}"), SAVED_EVERY))
    if exchanges(framework, method):
        path = directory / f"{name} for ddp"
        run = partial(attempt, train, framework)
        outcomes["saved"] = run(method, exact, EXCHANGED, save=Checkpoint(path, BATCHES))
        outcomes["to ddp"] = run(None, {}, EXCHANGED, resume=Checkpoint(Path(f"{path}-{BATCHES}"), BATCHES))
        outcomes["from ddp"] = run(method, exact, EXCHANGED, resume=Checkpoint(directory / f"ddp-{BATCHES}", BATCHES))
    return outcomes


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


def by_ddp(framework: str) -> Outcomes:
    directory = Path(folder().name) / framework
    directory.mkdir(exist_ok=True)
    return outcomes_of(train_by_ddp, framework, directory)


def by_method(framework: str, name: str) -> Outcomes:
    by_ddp(framework)  # it loads a checkpoint
    return outcomes_of(train_by_method, framework, name, Path(folder().name) / framework)


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(one, other), f"off by {(one - other).abs().max()}"


@pytest.mark.parametrize(
    ("framework", "name", "case"), [(*pair, case) for pair in PAIRS for case in cases_of(pair[0], METHODS[pair[1]])]
)
def test_exact_settings_are_ddp(framework: str, name: str, case: str) -> None:
    """Bit for bit, and so is the loss scale; a pipeline is the one whose stages are all in one process."""
    method = METHODS[name]
    for of_rank, of_ddp in zip(by_method(framework, name), by_ddp(framework), strict=True):
        actual = result_of(of_rank, ("exact", case))
        expected = result_of(of_rank, ("exact", "plain", case)) if method.pipeline else result_of(of_ddp, case)
        assert actual.seen == expected.seen
        assert actual.scale == expected.scale
        if method.sharded_norm and CASES[case].clip_norm:
            torch.testing.assert_close(actual.weights, expected.weights)
        else:
            assert_equal(actual.weights, expected.weights)
        if not method.own_norm:
            rounding = {} if method.sharded_norm else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(actual.norms, expected.norms, equal_nan=True, **rounding)


@pytest.mark.parametrize(
    ("framework", "name", "index", "case"),
    [(*pair, *typical) for pair in PAIRS for typical in typical_of(pair[0], METHODS[pair[1]])],
)
def test_typical_settings_are_those_of_a_plain_loop(framework: str, name: str, index: int, case: str) -> None:
    """Bit for bit, before they are consolidated, too; then the ranks agree, and the weights have moved."""
    outcomes = by_method(framework, name)
    for of_rank in outcomes:
        actual = result_of(of_rank, (index, case))
        assert actual.weights.isfinite().all()
        assert not torch.equal(actual.weights, flat(network(CASES[case])))
        assert_equal(actual.weights, outcomes[0][index, case].weights)
        if replays(framework, METHODS[name], index, CASES[case]):
            expected = result_of(of_rank, (index, "plain", case))
            assert_equal(actual.weights, expected.weights)
            if actual.own is not None:
                assert actual.norms == expected.norms
                assert_equal(actual.own, expected.own)


@pytest.mark.parametrize(
    ("framework", "name", "index"), [(*pair, index) for pair in PAIRS for index in range(len(METHODS[pair[1]].typical))]
)
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str, index: int) -> None:
    """Bit for bit, from within an epoch, in new objects. Saving changes nothing, except that it empties a pipeline."""
    outcomes = by_method(framework, name)
    for of_rank in outcomes:
        whole, resumed = result_of(of_rank, ("whole", index)), result_of(of_rank, ("resumed", index))
        assert len(whole.seen) == EPOCHS * BATCHES
        assert resumed.seen == whole.seen[SAVED_EVERY:]
        assert_equal(resumed.weights, whole.weights)
        assert_equal(whole.weights, outcomes[0]["whole", index].weights)
        if saving_is_compared(METHODS[name], index):
            assert_equal(result_of(of_rank, ("never saved", index)).weights, whole.weights)


@pytest.mark.parametrize(("framework", "name"), [pair for pair in PAIRS if exchanges(pair[0], METHODS[pair[1]])])
def test_checkpoints_interchange_with_ddp(framework: str, name: str) -> None:
    """They can be read with ``weights_only=True``; from where one was saved, the other continues, bit for bit."""
    method, directory = METHODS[name], Path(folder().name) / framework
    outcomes = by_method(framework, name)
    for of_rank, of_ddp in zip(outcomes, by_ddp(framework), strict=True):
        for direction, writer, stem in (("to ddp", method, f"{name} for ddp"), ("from ddp", None, "ddp")):
            result_of(of_rank, "saved")
            continued = result_of(of_rank, direction)
            assert_equal(continued.loaded, saved_weights(framework, writer, directory / f"{stem}-{BATCHES}"))
            assert_equal(continued.weights, outcomes[0][direction].weights)
            assert not torch.equal(continued.weights, continued.loaded)
            if not method.pipeline:
                assert_equal(continued.weights, result_of(of_ddp, "saved").weights)
