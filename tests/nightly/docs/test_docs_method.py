"""The methods in docs/adding_a_method.md train what the page says."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_pipesync
from lightning_pipesync.training.registry import METHODS
from tests.support.case_table import launch_cases
from tests.support.docs_pages import DOCS, snippets_of
from tests.support.models import seeded_mlp

PERIOD, STEPS, SAVED_AFTER = 3, 8, 4
SETTINGS: dict[str, dict[str, Any]] = {"PeriodicWeights": {"compression": "none"}, "PeriodicGradients": {}}


@pytest.fixture(autouse=True, scope="module")
def forgets_what_the_page_registers() -> Iterator[None]:
    with patch.dict(METHODS):
        yield


@functools.cache  # it registers a method
def guide() -> Any:
    """Returns a module with what the page's snippets define."""
    module = ModuleType("adding_a_method")
    sys.modules[module.__name__] = module
    for _, snippet in snippets_of(DOCS / "adding_a_method.md"):
        exec(snippet, vars(module))
    return module


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def reference(averages_gradients: bool) -> list[list[Tensor]]:
    """Returns the weights of each of two ranks; both train in this process."""
    models = [seeded_mlp() for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, step)
        copies_of = [*zip(*(model.parameters() for model in models), strict=True)]
        if step % PERIOD == 0 and averages_gradients:
            for one, other in copies_of:
                one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
        if step % PERIOD == 0 and not averages_gradients:
            for copies in copies_of:
                mean = torch.stack([copy.detach() for copy in copies]).mean(0)
                for copy in copies:
                    copy.data.copy_(mean)
    return [[parameter.detach() for parameter in model.parameters()] for model in models]


def train(name: str, resumes: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Returns this rank's weights, and the consolidated ones."""
    method, model = getattr(guide(), name), seeded_mlp()
    settings = {"period": PERIOD, **SETTINGS[name]}
    sync = method(model, optimizer_of(model), **settings)
    for step in range(1, STEPS + 1):
        model.zero_grad()
        backward(model, dist.get_rank(), step)
        sync.step()
        if step == SAVED_AFTER and resumes:
            saved = sync.state_dict()
            sync.detach()
            model = seeded_mlp(seed=1)
            sync = method(model, optimizer_of(model), **settings)
            sync.load_state_dict(saved)
    replica = [parameter.detach().clone() for parameter in model.parameters()]
    sync.flush()
    consolidated = [parameter.detach().clone() for parameter in model.parameters()]
    sync.detach()
    return replica, consolidated


def test_the_methods_of_the_guide_average_what_they_say_and_resume() -> None:
    guide()
    cases = {(name, resumes): partial(train, name, resumes) for name in SETTINGS for resumes in (False, True)}
    outcomes = launch_cases(cases, 2)
    for name in SETTINGS:
        expected = reference(averages_gradients=name == "PeriodicGradients")
        mean = [torch.stack(copies).mean(0) for copies in zip(*expected, strict=True)]
        for rank, (replica, consolidated) in enumerate(outcomes[name, False]):
            torch.testing.assert_close(replica, expected[rank])
            torch.testing.assert_close(consolidated, mean)
            assert all(map(torch.equal, replica, outcomes[name, True][rank][0]))
        assert any(not torch.equal(first, second) for first, second in zip(*expected, strict=True))
    strategies = [lightning_pipesync.PeriodicWeightsStrategy, lightning_pipesync.fabric.PeriodicWeightsFabricStrategy]
    assert [strategy(period=8).config.period for strategy in strategies] == [8, 8]
