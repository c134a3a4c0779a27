"""NCCL with two ranks that share the device, where NCCL allows it: its collectives, and methods that use them."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.comm.nccl import NcclExchange
from tests.conformance.cases import CASES
from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.table import assert_equal
from tests.cuda.device import (
    DEVICE,
    cases_on_device,
    launch_over_nccl,
    on_device,
    skip_unless_over_nccl,
)
from tests.cuda.test_gloo import by_ddp
from tests.quick.core.test_nccl import exchange_all_kinds
from tests.support.case_table import Outcomes, launch_cases

NAMES = [name for name in METHODS if name not in ("parameter_server", "ea_pipe")]  # which use Gloo alone


@pytest.fixture(autouse=True)
def two_ranks() -> None:
    skip_unless_over_nccl()


def exchange_on_device(sums_wide: bool) -> dict[str, bool]:
    return exchange_all_kinds(NcclExchange(dist.new_group(backend="nccl"), DEVICE, sums_wide), DEVICE)


@pytest.mark.parametrize("sums_wide", [False, True])
def test_the_exchange_makes_what_gloo_makes(sums_wide: bool) -> None:
    for same in launch_over_nccl(exchange_on_device, 2, sums_wide):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


@cache
def by_method(name: str) -> Outcomes:
    method = METHODS[name]
    cases = {}
    for case in cases_on_device("plain", method):
        options = on_device(CASES[case], ranks=2)
        for kind, settings in (("exact", method.exact), ("typical", method.typical[0])):
            cases[kind, case] = partial(train, "plain", method, {**settings, "backend": "nccl"}, options)
    return launch_cases(cases, 2, launch=launch_over_nccl)


ALL_CASES = [(name, case) for name in NAMES for case in cases_on_device("plain", METHODS[name])]


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_exact_settings_are_ddp(name: str, case: str) -> None:
    """Bit for bit, as the sum of two ranks has one order."""
    for actual, expected in zip(by_method(name)["exact", case], by_ddp()[case], strict=True):
        if METHODS[name].sharded_norm and CASES[case].clip_norm:
            torch.testing.assert_close(actual.weights, expected.weights)
        else:
            assert_equal(actual.weights, expected.weights)


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_typical_settings_end_with_the_same_weights(name: str, case: str) -> None:
    first, *others = by_method(name)["typical", case]
    assert first.weights.isfinite().all()
    for other in others:
        assert_equal(other.weights, first.weights)
