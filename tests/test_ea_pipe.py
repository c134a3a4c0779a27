"""EA-Pipe and its baselines on real processes against one-process simulations with plain tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_pipesync.methods.ea_pipe import EAPipe
from tests.harness import launch
from tests.models import batch
from tests.reference_ea_pipe import Weights, ea_pipe, one_version, pipedream, weight_stashing

STEPS = 21
#: Indices of the layers with which the stages begin, by their number; each stage has at least one Linear.
CUTS = {1: (), 2: (4,), 3: (2, 6), 4: (2, 4, 7)}
STAGE_OF = {1: [0] * 5, 2: [0, 0, 1, 1, 1], 3: [0, 1, 1, 2, 2], 4: [0, 1, 2, 2, 3]}
OPTIMIZERS = {
    "sgd": lambda weights: SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "plain sgd": lambda weights: SGD(weights, lr=0.05),
    "adam": lambda weights: Adam(weights, lr=0.01),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"tau={tau}": ("sgd", {"period": tau, "elastic_force": 0.3}) for tau in (1, 2, 3)},
    **{f"adam, tau={tau}": ("adam", {"period": tau}) for tau in (1, 2, 3)},
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


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(inplace=True),
        nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(inplace=True), nn.Linear(8, 3),
    )  # fmt: skip


def train(optimizer_name: str, settings: dict[str, Any], virtual_stages: int | None = None) -> dict[str, Any]:
    """The losses, where the last stage is, and the master's weights."""
    model = layers(seed=0 if virtual_stages else torch.distributed.get_rank())  # rank 0's weights count
    engine = EAPipe(
        model, nn.functional.cross_entropy, OPTIMIZERS[optimizer_name], virtual_stages=virtual_stages, **settings
    )
    losses = [engine.train_batch(batch(t, 0)) for t in range(STEPS)]
    engine.gather()
    engine.detach()
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()]}


def train_all(world_size: int) -> dict[str, dict[str, Any]]:
    return {
        name: train(optimizer, {"split": CUTS[world_size], **settings}) for name, (optimizer, settings) in CASES.items()
    }


@cache
def outcomes(world_size: int) -> list[dict[str, dict[str, Any]]]:
    return launch(train_all, world_size, world_size)


def expected(case: str, num_stages: int) -> Weights:
    optimizer_name, settings = CASES[case]
    make_optimizer = OPTIMIZERS[optimizer_name]
    known = dict(settings)
    algorithm = known.pop("algorithm", "ea_pipe")
    tau = known.pop("period", 1)
    initial = [p.detach() for p in layers().parameters()]
    batches = [batch(t, 0) for t in range(STEPS)]
    if algorithm == "ea_pipe":
        return ea_pipe(initial, make_optimizer, batches, num_stages, sync_period=tau, **known)
    if algorithm == "pipedream":
        return pipedream(initial, make_optimizer, batches, num_stages)
    if algorithm == "weight_stashing":
        return weight_stashing(initial, make_optimizer, batches, STAGE_OF[num_stages])
    smoothing = {"naive": None, "spectrain": 0.9 if "smoothed" in case else 0.0}[algorithm]
    return one_version(initial, make_optimizer, batches, STAGE_OF[num_stages], smoothing)


def assert_equal(weights: list[Tensor], reference: list[Tensor]) -> None:
    for index, (tensor, other) in enumerate(zip(weights, reference, strict=True)):
        assert torch.equal(tensor, other), f"tensor {index}: off by {(tensor - other).abs().max()}"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_follows_the_algorithm(case: str, num_stages: int) -> None:
    """Bit for bit, on every rank."""
    reference = expected(case, num_stages)
    for outcome in outcomes(num_stages):
        assert_equal(outcome[case]["weights"], reference)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_virtual_stages_are_the_same(case: str, num_stages: int) -> None:
    optimizer, settings = CASES[case]
    outcome = train(optimizer, {"split": CUTS[num_stages], **settings}, virtual_stages=num_stages)
    on_processes = outcomes(num_stages)[0][case]
    assert_equal(outcome["weights"], on_processes["weights"])
    assert outcome["losses"] == on_processes["losses"]


@pytest.mark.parametrize("rows", [8, 1])
def test_one_stage_with_hardly_any_force_is_plain_sgd(rows: int) -> None:
    """Products with a single row round by the address of the weights on some processors."""
    model = layers()
    engine = EAPipe(model, nn.functional.cross_entropy, OPTIMIZERS["sgd"], virtual_stages=1, elastic_force=1e-30)
    plain = layers()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for t in range(STEPS):
        x, y = batch(t, 0, size=rows)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        assert engine.train_batch((x, y)) == loss
