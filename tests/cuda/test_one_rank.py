"""Every method on every framework, on one rank with NCCL: what the framework trains with DistributedDataParallel.

The transport sends nothing to itself; hooks, streams and updates are those of many ranks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.conformance.cases import CASES, PAIRS, cases_of
from tests.conformance.launches import Outcomes, attempt, result_of
from tests.conformance.loops import run_loop
from tests.conformance.methods import FRAMEWORKS, METHODS, Method
from tests.conformance.pipelines import VirtualPipelineLoop
from tests.conformance.runners import train
from tests.conformance.test_training import SAVED_EVERY, assert_equal, exact_settings
from tests.conformance.training import Checkpoint, Options, Result
from tests.cuda.device import launch_on_device, needs_cuda, on_device

pytestmark = needs_cuda

#: The frameworks save the state of the device's random numbers, a plain loop does not.
RESUMED = {name: on_device(Options("adamw", dropout=0.2 * (name != "plain")), ranks=1) for name in FRAMEWORKS}


class OneStageLoop(VirtualPipelineLoop):
    """A pipeline of one stage, without a transport."""

    virtual_stages = 1


def on_one_rank(method: Method, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings; a pipeline has one stage."""
    return {**settings, "split": ()} if method.pipeline else settings


def batches_of(seen: list[list[int]]) -> list[list[int]]:
    """Returns the batches: in the Trainer, the first stage reads each, and then the last one, which is the same."""
    return [batch for index, batch in enumerate(seen) if index == 0 or batch != seen[index - 1]]


def train_all(framework: str, directory: str) -> dict[Any, Any]:
    """Trains by DistributedDataParallel and by every method that the framework has."""
    outcomes: dict[Any, Any] = {}
    for case in cases_of(framework, None):
        outcomes["ddp", case] = attempt(train, framework, None, {}, on_device(CASES[case], ranks=1))
    for method in (METHODS[name] for of, name in PAIRS if of == framework):
        settings = on_one_rank(method, exact_settings(framework, method))
        for case in cases_of(framework, method):
            options = on_device(CASES[case], ranks=1)
            outcomes[method.name, case] = result = attempt(train, framework, method, settings, options)
            if method.pipeline and isinstance(result, Result):
                reference = attempt(run_loop, OneStageLoop, method, settings, options, batches_of(result.seen))
                outcomes[method.name, "virtual", case] = reference
        typical, options = on_one_rank(method, method.typical[0]), RESUMED[framework]
        path = Path(directory) / method.name
        save, again = Checkpoint(path, SAVED_EVERY), Checkpoint(Path(f"{path}, again"), SAVED_EVERY)
        saved = Checkpoint(Path(f"{path}-{SAVED_EVERY}"), SAVED_EVERY)
        outcomes[method.name, "whole"] = attempt(train, framework, method, typical, options, save=save)
        outcomes[method.name, "resumed"] = attempt(train, framework, method, typical, options, save=again, resume=saved)
    return outcomes


@cache
def outcomes_of(framework: str) -> Outcomes:
    with TemporaryDirectory() as directory:
        return launch_on_device(train_all, 1, framework, directory, init=framework == "plain")


@pytest.mark.parametrize(
    ("framework", "name", "case"), [(*pair, case) for pair in PAIRS for case in cases_of(pair[0], METHODS[pair[1]])]
)
def test_exact_settings_are_ddp(framework: str, name: str, case: str) -> None:
    """Bit for bit, and so is the loss scale; a pipeline of one stage is the one without a transport."""
    [outcomes] = outcomes_of(framework)
    method = METHODS[name]
    actual = result_of(outcomes, (name, case))
    expected = result_of(outcomes, (name, "virtual", case) if method.pipeline else ("ddp", case))
    assert batches_of(actual.seen) == expected.seen
    assert actual.scale == expected.scale
    if method.sharded_norm and CASES[case].clip_norm:
        torch.testing.assert_close(actual.weights, expected.weights)
    else:
        assert_equal(actual.weights, expected.weights)


@pytest.mark.parametrize(("framework", "name"), PAIRS)
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str) -> None:
    [outcomes] = outcomes_of(framework)
    assert_equal(result_of(outcomes, (name, "resumed")).weights, result_of(outcomes, (name, "whole")).weights)
