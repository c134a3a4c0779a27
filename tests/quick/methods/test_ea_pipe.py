"""EA-Pipe and its baselines on real processes against one-process simulations with plain tensors."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.references.ea_pipe import Weights, reference_of
from tests.support.case_table import Outcomes, launch_cases
from tests.support.ea_pipe_runs import CUTS, OPTIMIZERS, assert_equal, engine_on, layers
from tests.support.models import batch

STEPS = 21
#: The stage of each Linear, by the number of stages.
STAGE_OF = {1: [0] * 5, 2: [0, 0, 1, 1, 1], 3: [0, 1, 1, 2, 2], 4: [0, 1, 2, 2, 3]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"tau={tau}": ("sgd", {"period": tau, "elastic_force": 0.3}) for tau in (1, 2, 3)},
    "adam": ("adam", {"period": 2}),
    "more replicas": ("sgd", {"replicas": 6}),
    "pipedream": ("sgd", {"algorithm": "pipedream"}),
    "pipedream, adam": ("adam", {"algorithm": "pipedream"}),
    "weight stashing": ("sgd", {"algorithm": "weight_stashing"}),
    "weight stashing, adam": ("adam", {"algorithm": "weight_stashing"}),
    "naive": ("sgd", {"algorithm": "naive"}),
    "naive, adam": ("adam", {"algorithm": "naive"}),
    "spectrain": ("sgd", {"algorithm": "spectrain"}),
    "spectrain, adam": ("adam", {"algorithm": "spectrain"}),
    "spectrain, smoothed": ("plain sgd", {"algorithm": "spectrain"}),
}
#: The cases that differ in what stages send to each other, and when.
ON_PROCESSES = ("tau=2", "adam", "more replicas", "pipedream", "weight stashing", "naive", "spectrain")


def train(optimizer_name: str, settings: dict[str, Any], virtual_stages: int | None = None) -> dict[str, Any]:
    """The losses, where the last stage is, and the master's weights."""
    model = layers(seed=0 if virtual_stages else torch.distributed.get_rank())  # rank 0's weights count
    engine = engine_on(model, optimizer_name, virtual_stages=virtual_stages, **settings)
    losses = [engine.train_batch(batch(t, 0)) for t in range(STEPS)]
    engine.gather()
    engine.detach()
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()]}


@cache
def on_processes() -> Outcomes:
    cases = {case: partial(train, CASES[case][0], {"split": CUTS[4], **CASES[case][1]}) for case in ON_PROCESSES}
    return launch_cases(cases, 4)


@cache
def virtual(case: str, num_stages: int) -> dict[str, Any]:
    optimizer, settings = CASES[case]
    return train(optimizer, {"split": CUTS[num_stages], **settings}, virtual_stages=num_stages)


def expected(case: str, num_stages: int) -> Weights:
    optimizer, settings = CASES[case]
    initial, batches = [p.detach() for p in layers().parameters()], [batch(t, 0) for t in range(STEPS)]
    smoothing = 0.9 if "smoothed" in case else 0.0
    return reference_of(settings, initial, OPTIMIZERS[optimizer], batches, STAGE_OF[num_stages], smoothing)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_follows_the_algorithm(case: str, num_stages: int) -> None:
    assert_equal(virtual(case, num_stages)["weights"], expected(case, num_stages))


@pytest.mark.parametrize("case", ON_PROCESSES)
def test_processes_are_virtual_stages(case: str) -> None:
    """Bit for bit, on every rank."""
    for outcome in on_processes()[case]:
        assert_equal(outcome["weights"], virtual(case, 4)["weights"])
    assert on_processes()[case][0]["losses"] == virtual(case, 4)["losses"]


@pytest.mark.parametrize("rows", [8, 1])
def test_one_stage_with_hardly_any_force_is_plain_sgd(rows: int) -> None:
    """Products with a single row round by the address of the weights on some processors."""
    model = layers()
    engine = engine_on(model, virtual_stages=1, elastic_force=1e-30)
    plain = layers()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for t in range(STEPS):
        x, y = batch(t, 0, size=rows)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        assert engine.train_batch((x, y)) == loss
