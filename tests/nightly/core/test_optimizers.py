"""DeAR's updates of whole buckets and of shards, with every optimizer: those of DDP, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_pipesync import DeAR
from tests.support.case_table import Outcomes, launch_cases
from tests.support.models import Averaged, Run, assert_same, seeded_mlp

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "Adam": partial(Adam, amsgrad=True),
    "AdamW": AdamW,
    "fused": partial(AdamW, fused=True),
    "RMSprop": partial(RMSprop, momentum=0.9, centered=True),
    "Adagrad": Adagrad,
    "NAdam": NAdam,
    "RAdam": RAdam,
    "Adamax": Adamax,
    "ASGD": ASGD,
}
WAYS: dict[str, tuple[type, dict[str, Any]]] = {
    "replicated": (DeAR, {"fusion": "buffer", "update": "replicated"}),
    "sharded": (DeAR, {"fusion": "buffer", "update": "sharded"}),
    "averaged": (Averaged, {}),
}


class WithoutSome(nn.Module):
    """In some steps no rank has a gradient of one of its layers, so that the optimizer's counts of steps differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = seeded_mlp(), 0
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        hidden: Tensor = self.layers(x)
        return hidden if self.passes in (7, 8) else self.head(hidden)


def make(name: str, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[name](model.parameters())


def train(way: str, name: str) -> dict[str, Tensor]:
    """Trains, in a run that is resumed, too; afterwards with steps in which a layer has no gradient."""
    kind, settings = WAYS[way]
    run = Run(kind, partial(make, name), WithoutSome(), **settings)
    run.steps(range(4))
    if way != "averaged":
        run = run.resumed(continued(run.model))
    run.steps(range(4, 12))
    assert dist.get_world_size() == 2
    return run.end()


def continued(model: nn.Module) -> WithoutSome:
    """Returns a new model, whose passes are counted on."""
    other = WithoutSome()
    assert isinstance(model, WithoutSome)
    other.passes = model.passes
    return other


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch_cases({(way, name): partial(train, way, name) for way in WAYS for name in OPTIMIZERS}, 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_optimizer(name: str, outcomes: Outcomes) -> None:
    for way in ("replicated", "sharded"):
        for found, expected in zip(outcomes[way, name], outcomes["averaged", name], strict=True):
            assert_same(found, expected, way)
