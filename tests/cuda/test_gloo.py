"""Every method with tensors of the device over Gloo, on two ranks that share it: they are sent through the host."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from lightning_pipesync import EAPipe
from lightning_pipesync.core.comm.transport import Transport
from tests.conformance.cases import CASES
from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.table import SAVED_EVERY, assert_equal, train_twice
from tests.conformance.training import Checkpoint, Options, flat, network
from tests.cuda.device import DEVICE, cases_on_device, launch_on_device, needs_cuda, on_device
from tests.references.collectives import DTYPES, SIZES, rank_order_sum, values
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised

GLOO = {"backend": "gloo"}
#: A plain loop saves the state of the CPU's random numbers only, so that nothing is drawn.
RESUMED = on_device(Options("adamw"), ranks=2)


@cache
def by_ddp() -> Outcomes:
    cases = {
        case: partial(train, "plain", None, {}, on_device(CASES[case], ranks=2))
        for case in cases_on_device("plain", None)
    }
    return launch_cases(cases, 2, launch=launch_on_device)


@cache
def by_method(name: str) -> Outcomes:
    method, cases = METHODS[name], {}
    for case in cases_on_device("plain", method):
        options = on_device(CASES[case], ranks=2)
        for kind, chosen in (("exact", method.exact), ("typical", method.typical[0])):
            cases[kind, case] = partial(train_twice, "plain", method, {**chosen, **GLOO}, options, method.pipeline)
    with TemporaryDirectory() as directory:
        for index, chosen in enumerate(method.typical):
            run = partial(train, "plain", method, {**chosen, **GLOO}, RESUMED)
            saved, again = (Checkpoint(Path(directory) / f"{index}{which}", SAVED_EVERY) for which in ("", ", again"))
            cases["whole", index] = partial(run, save=saved)
            cases["resumed", index] = partial(run, save=again, resume=saved.first)
        return launch_cases(cases, 2, launch=launch_on_device)


ALL_CASES = [(name, case) for name, method in METHODS.items() for case in cases_on_device("plain", method)]


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_exact_settings_are_ddp(name: str, case: str) -> None:
    """Bit for bit, as the sum of two ranks has one order; a pipeline is the one in one process."""
    method = METHODS[name]
    of_ddp = [None] * 2 if method.pipeline else by_ddp()[case]
    for (actual, in_one_process), by_framework in zip(by_method(name)["exact", case], of_ddp, strict=True):
        expected = by_framework or in_one_process
        if method.sharded_norm and CASES[case].clip_norm:
            torch.testing.assert_close(actual.weights, expected.weights)
        else:
            assert_equal(actual.weights, expected.weights)


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_typical_settings_end_with_the_same_weights(name: str, case: str) -> None:
    trained = by_method(name)["typical", case]
    for actual, _ in trained:
        assert actual.weights.isfinite().all()
        assert not torch.equal(actual.weights, flat(network(CASES[case])))
        assert_equal(actual.weights, trained[0][0].weights)


@pytest.mark.parametrize(
    ("name", "index"), [(name, index) for name, method in METHODS.items() for index in range(len(method.typical))]
)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, index: int) -> None:
    outcomes = by_method(name)
    for resumed, whole in zip(outcomes["resumed", index], outcomes["whole", index], strict=True):
        assert_equal(resumed.weights, whole.weights)


def all_reduce_and_halves() -> dict[str, bool]:
    transport = Transport(DEVICE, timeout_s=60, backend="gloo")
    same = {}
    for dtype in DTYPES:
        for numel in SIZES:
            expected = rank_order_sum(numel, dtype, 2)
            whole, halves = (values(numel, dtype, transport.rank).to(DEVICE) for _ in range(2))
            transport.all_reduce(whole).wait()
            own = transport.reduce_scatter(halves).wait()
            same[f"reduce-scatter, {dtype} {numel}"] = torch.equal(own.cpu(), transport.shard(expected))
            transport.all_gather(halves).wait()
            same[f"all-reduce, {dtype} {numel}"] = torch.equal(whole.cpu(), expected)
            same[f"all-gather, {dtype} {numel}"] = torch.equal(halves.cpu(), expected)
            sent = values(numel, dtype, transport.rank).to(DEVICE)
            transport.broadcast(sent, src=1).wait()
            same[f"broadcast, {dtype} {numel}"] = torch.equal(sent.cpu(), values(numel, dtype, 1))
    transport.close()
    return same


def test_collectives_of_the_transport() -> None:
    for same in launch_on_device(all_reduce_and_halves, 2):
        assert all(same.values()), [name for name, equal in same.items() if not equal]


def all_reduce_compressed(name: str) -> list[torch.Tensor]:
    results = []
    for device in (torch.device("cpu"), DEVICE):
        transport = Transport(device, timeout_s=60, backend="gloo")
        flat = values(5000, torch.float32, transport.rank).to(device)
        feedback = transport.feedback(flat)
        for _ in range(3):
            transport.all_reduce(flat, codec=name, mean=True, feedback=feedback).wait()
        results.append(flat.cpu())
        transport.close()
    return results


@pytest.mark.parametrize("name", ["bf16", "int8", "topk"])
def test_what_is_compressed_is_compressed_on_the_host(name: str) -> None:
    """So the bits are those of CPU tensors."""
    for on_cpu, staged in launch_on_device(all_reduce_compressed, 2, name):
        assert_equal(staged, on_cpu)


def pipeline_of_torch(algorithm: str) -> tuple[str, str] | None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(DEVICE)
    return raised(
        lambda: EAPipe(layers, None, lambda p: torch.optim.SGD(p, lr=0.1), algorithm=algorithm, backend="gloo")
    )


@needs_cuda
@pytest.mark.parametrize("algorithm", ["gpipe", "1f1b"])
def test_pytorchs_own_schedules_are_refused(algorithm: str) -> None:
    """They send CUDA tensors, which Gloo cannot."""
    for outcome in launch_on_device(pipeline_of_torch, 2, algorithm):
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert algorithm in outcome[1]
        assert "backend='nccl'" in outcome[1]
