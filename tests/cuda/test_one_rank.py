"""Every method on every framework, on one rank with NCCL: what the framework trains with DistributedDataParallel.

Hooks, streams and updates are those of many ranks. One rank exchanges nothing, except in a plain loop, which is tested
with the collectives of NCCL, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_pipesync.core.comm.collectives import Collectives
from tests.conformance.cases import CASES, PAIRS
from tests.conformance.loops import run_loop
from tests.conformance.methods import FRAMEWORKS, METHODS, Method
from tests.conformance.pipelines import VirtualPipelineLoop
from tests.conformance.runners import train
from tests.conformance.table import SAVED_EVERY, assert_equal, exact_settings
from tests.conformance.training import Checkpoint, Options, Result
from tests.cuda.device import cases_on_device, launch_on_device, needs_cuda, on_device
from tests.support.case_table import Outcomes, launch_cases

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


def train_also_virtually(
    framework: str, method: Method, settings: dict[str, Any], options: Options
) -> tuple[Result, Result | None]:
    """Returns what comes of the training, and of that of a pipeline without a transport."""
    result = train(framework, method, settings, options)
    if not method.pipeline:
        return result, None
    return result, run_loop(OneStageLoop, method, settings, options, batches_of(result.seen))


def through_nccl(train: Callable[..., Any], *args: Any) -> Any:
    """Trains with collectives of NCCL that this rank, which is alone, would leave out."""
    with patch.object(Collectives, "_alone", False):
        return train(*args)


@cache
def outcomes_of(framework: str) -> Outcomes:
    """Trains by DistributedDataParallel and by every method that the framework has."""
    cases: dict[Any, Any] = {
        ("ddp", case): partial(train, framework, None, {}, on_device(CASES[case], ranks=1))
        for case in cases_on_device(framework, None)
    }
    with TemporaryDirectory() as directory:
        for method in (METHODS[name] for of, name in PAIRS if of == framework):
            settings = on_one_rank(method, exact_settings(framework, method))
            for case in cases_on_device(framework, method):
                options = on_device(CASES[case], ranks=1)
                training = partial(train_also_virtually, framework, method, settings, options)
                cases[method.name, case] = training
                if framework == "plain":
                    cases[method.name, case, "through NCCL"] = partial(through_nccl, training)
            typical = on_one_rank(method, method.typical[0])
            run = partial(train, framework, method, typical, RESUMED[framework])
            path = Path(directory) / method.name
            saved, again = Checkpoint(path, SAVED_EVERY), Checkpoint(Path(f"{path}, again"), SAVED_EVERY)
            cases[method.name, "whole"] = partial(run, save=saved)
            cases[method.name, "resumed"] = partial(run, save=again, resume=saved.first)
        return launch_cases(cases, 1, init=framework == "plain", launch=launch_on_device)


def assert_is_ddp(framework: str, method: Method, case: str, key: tuple[str, ...]) -> None:
    outcomes = outcomes_of(framework)
    [(actual, virtual)] = outcomes[key]
    expected = virtual or outcomes["ddp", case][0]
    assert batches_of(actual.seen) == expected.seen
    assert actual.scale == expected.scale
    if method.sharded_norm and CASES[case].clip_norm:
        torch.testing.assert_close(actual.weights, expected.weights)
    else:
        assert_equal(actual.weights, expected.weights)


@pytest.mark.parametrize(
    ("framework", "name", "case"),
    [(*pair, case) for pair in PAIRS for case in cases_on_device(pair[0], METHODS[pair[1]])],
)
def test_exact_settings_are_ddp(framework: str, name: str, case: str) -> None:
    """Bit for bit, and so is the loss scale; a pipeline of one stage is the one without a transport."""
    assert_is_ddp(framework, METHODS[name], case, (name, case))


@needs_cuda
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in METHODS for case in cases_on_device("plain", METHODS[name])]
)
def test_exact_settings_are_ddp_through_nccl(name: str, case: str) -> None:
    assert_is_ddp("plain", METHODS[name], case, (name, case, "through NCCL"))


@pytest.mark.parametrize(("framework", "name"), PAIRS)
def test_a_resumed_run_is_the_uninterrupted_one(framework: str, name: str) -> None:
    outcomes = outcomes_of(framework)
    [resumed], [whole] = outcomes[name, "resumed"], outcomes[name, "whole"]
    assert_equal(resumed.weights, whole.weights)
