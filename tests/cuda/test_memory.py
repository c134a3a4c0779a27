"""The memory of a step: after the first steps the device allocates no more, whatever is in flight."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.methods import METHODS
from tests.cuda.device import BACKEND, DEVICE, ON_GPU, forget_peak, launch_on_device, synchronize
from tests.support.case_table import Outcomes, launch_cases

#: DeAR measures its first steps, and makes its schedule from them.
WARM_UP, MEASURED = (12, 10) if ON_GPU else (2, 2)
WIDTH, BATCH = 512, 64
#: Settings that keep the buckets as they are, several of them, and what else a user would choose.
SETTINGS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer", "bucket_mb": 1.0},
    "dear, sharded int8": {"fusion": "buffer", "bucket_mb": 1.0, "update": "sharded", "compression": "int8"},
    "selsync": {"delta": 0.0, "bucket_mb": 1.0},
    "selsync, forward": {"delta": 0.0, "bucket_mb": 1.0, "overlap": "forward"},
    "pipe_sgd": {},
    "pipe_sgd, level 2": {"pipeline_level": 2, "compression": "int8"},
}


def usage() -> dict[str, int]:
    """Returns the bytes of all tensors, the most that the allocator has held, and how often it has asked for more.

    The peak of the tensors alone would depend on whether temporary ones of the threads coincide; what the allocator
    holds for each stream does not.
    """
    synchronize()
    if not ON_GPU:
        return {}
    stats = torch.cuda.memory_stats(DEVICE)
    names = {
        "bytes": "allocated_bytes.all.current",
        "held": "reserved_bytes.all.peak",
        "asked": "segment.all.allocated",
    }
    return {name: stats[key] for name, key in names.items()}


def train(name: str, backend: str) -> list[dict[str, int]]:
    """Returns the usage after the first steps, and after as many again twice."""
    forget_peak()
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    sync = METHODS[name.split(",")[0]].plain(model, optimizer, backend=backend, **SETTINGS[name])
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    found = []
    for steps in (WARM_UP, MEASURED, MEASURED):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            sync.step()
            synchronize()  # otherwise the host may be some steps ahead, by how many depends on the machine
        sync.synchronize()
        found.append(usage())
    sync.detach()
    return found


@cache
def trained(backend: str, world_size: int) -> Outcomes:
    cases = {name: partial(train, name, backend) for name in SETTINGS}
    return launch_cases(cases, world_size, launch=launch_on_device)


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), (BACKEND, 1)])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_allocates_no_more_than_the_one_before(name: str, backend: str, world_size: int) -> None:
    for _, earlier, later in trained(backend, world_size)[name]:
        assert later == earlier
