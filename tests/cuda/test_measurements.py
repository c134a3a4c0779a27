"""What is measured on the device: codecs beside a copy, steps beside DDP's, a plan. Nothing is asserted of a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.codecs.shards import shards_of
from lightning_pipesync.lab.plan.measure import measure_plan
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import of_result
from tests.cuda.device import (
    DEVICE,
    ON_GPU,
    launch_over_nccl,
    skip_unless_over_nccl,
    synchronize,
)

Record = Callable[[str, object], None]

CODECS = ("bf16", "fp8", "int8", "int4", "int2", "chunked_topk", "topk")
NUM_SHARDS = 4
#: The model, and the rate of each of four ranks' links; a rehearsal has a smaller one, between two.
STEPS = [(model, rate) for model in ("resnet50", "transformer-14m") for rate in ("1gbit", "10gbit")]
STEPS = STEPS if ON_GPU else [("transformer", "1gbit")]


def seconds_of(operation: Callable[[], object], repetitions: int = 20 if ON_GPU else 2) -> float:
    """Returns the seconds of one of so many repetitions on the device, after one that compiles."""
    operation()
    synchronize()
    began = time.perf_counter()
    for _ in range(repetitions):
        operation()
    synchronize()
    return (time.perf_counter() - began) / repetitions


@pytest.mark.parametrize("name", CODECS)
def test_codecs_beside_a_copy(name: str, record_property: Record) -> None:
    flat = torch.randn(2**25 if ON_GPU else 2**20, device=DEVICE)
    copy, residual = torch.empty_like(flat), torch.zeros_like(flat)
    shards = shards_of(get_codec(name), flat.numel() // NUM_SHARDS, flat)
    wires, own = shards.wires(NUM_SHARDS).zero_(), torch.empty(shards.size, device=DEVICE)
    operations = {
        "copy": lambda: copy.copy_(flat),
        "encode": lambda: shards.encode(flat, wires, None),
        "encode with feedback": lambda: shards.encode(flat, wires, residual.zero_()),
        "decode": lambda: shards.decode(wires, copy),
        "sum of four shards": lambda: shards.sum(wires, own, NUM_SHARDS),
    }
    took = {what: seconds_of(operation) for what, operation in operations.items()}
    speeds = [f"{what} {flat.nbytes / s / 1e9:.0f} GB/s ({took['copy'] / s:.2f})" for what, s in took.items()]
    record_property(f"{name}: of the values, and beside a copy", ", ".join(speeds))


@pytest.mark.parametrize(("model", "rate"), STEPS)
def test_steps_beside_ddp(model: str, rate: str, tmp_path: Path, record_property: Record) -> None:
    if model.startswith("resnet"):
        pytest.importorskip("transformers", reason="ResNet-50 is transformers'")
    command = [sys.executable, "-m", "tests.cuda.steps", model, rate, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert found.returncode == 0, found.stdout + found.stderr
    record_property(f"{model} on ranks that share the device, {rate}", found.stdout)


def plan() -> str:
    settings = PlanSettings("transformer", steps=2, rounds=1 if ON_GPU else 0, device=DEVICE.type)
    result = measure_plan(settings, lambda text: None)
    if "error" in result:
        return str(result["error"])
    work, cluster, _ = of_result(result)
    return as_markdown(work, cluster, {"measured": {}, **result})


def test_a_plan(record_property: Record) -> None:
    if ON_GPU:
        skip_unless_over_nccl()
    [text, _] = launch_over_nccl(plan, 2)
    record_property("plan", text)
