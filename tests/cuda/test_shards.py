"""FSDP2 shards the network on the device, and methods average between two replicas, of a rank each."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from tests.conformance.cases import CASES
from tests.conformance.loops import run_loop
from tests.conformance.methods import METHODS
from tests.conformance.shards import ShardedPlainLoop
from tests.conformance.table import assert_equal
from tests.conformance.training import Result
from tests.cuda.device import launch_with_both, on_device
from tests.cuda.test_gloo import GLOO, by_ddp
from tests.support.case_table import Outcomes, launch_cases

NAMES = [name for name, method in METHODS.items() if method.sharded]


def train(name: str, exact: bool) -> Result:
    """NCCL carries what FSDP2 sends, in groups of one rank, and Gloo what the method does."""
    method = METHODS[name]
    settings = method.exact if exact else method.typical[method.sharded[0]]
    return run_loop(ShardedPlainLoop, method, {**settings, **GLOO}, on_device(CASES["sgd"], ranks=2))


@cache
def outcomes() -> Outcomes:
    cases = {(name, exact): partial(train, name, exact) for name in NAMES for exact in (True, False)}
    return launch_cases(cases, 2, launch=launch_with_both)


@pytest.mark.parametrize("name", NAMES)
def test_exact_settings_are_ddp(name: str) -> None:
    for actual, expected in zip(outcomes()[name, True], by_ddp()["sgd"], strict=True):
        torch.testing.assert_close(actual.weights, expected.weights)


@pytest.mark.parametrize("name", NAMES)
def test_typical_settings_end_with_the_same_weights(name: str) -> None:
    first, *others = outcomes()[name, False]
    assert first.weights.isfinite().all()
    for other in others:
        assert_equal(other.weights, first.weights)
