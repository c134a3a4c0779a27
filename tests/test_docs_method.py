"""The method on an engine in docs/adding_a_method.md trains what it says."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.case_table import launch_cases
from tests.models import seeded_mlp
from tests.test_docs import DOCS, snippets_of

PERIOD, STEPS, SAVED_AFTER = 3, 11, 5


def method_of_the_guide() -> Any:
    """Returns the class that the page's snippets define."""
    module = ModuleType("adding_a_method")
    sys.modules[module.__name__] = module
    for _, snippet in snippets_of(DOCS / "adding_a_method.md"):
        exec(snippet, vars(module))
    return vars(module)["PeriodicGradients"]


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def reference(world_size: int) -> list[list[Tensor]]:
    """Returns the weights of each rank; all train in this process."""
    models = [seeded_mlp() for _ in range(world_size)]
    optimizers = [optimizer_of(model) for model in models]
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, step)
        if step % PERIOD == 0:
            for copies in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([copy.grad for copy in copies]).mean(0)
                for copy in copies:
                    copy.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [[parameter.detach() for parameter in model.parameters()] for model in models]


def train(resumes: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns this rank's weights, and the consolidated ones."""
    method = method_of_the_guide()
    model = seeded_mlp()
    sync = method(model, optimizer_of(model), period=PERIOD)
    for step in range(1, STEPS + 1):
        model.zero_grad()
        backward(model, dist.get_rank(), step)
        sync.step()
        if step == SAVED_AFTER and resumes:
            saved = sync.state_dict()
            sync.detach()
            model = seeded_mlp(seed=1)
            sync = method(model, optimizer_of(model), period=PERIOD)
            sync.load_state_dict(saved)
    replica = [parameter.detach().clone() for parameter in model.parameters()]
    sync.flush()
    consolidated = [parameter.detach().clone() for parameter in model.parameters()]
    sync.detach()
    return replica, consolidated


def test_the_method_of_the_guide_averages_gradients_periodically_and_resumes() -> None:
    expected = reference(2)
    mean = [torch.stack(copies).mean(0) for copies in zip(*expected, strict=True)]
    outcomes = launch_cases({resumes: partial(train, resumes) for resumes in (False, True)}, 2)
    for rank, ((replica, consolidated), (resumed, _)) in enumerate(zip(outcomes[False], outcomes[True], strict=True)):
        torch.testing.assert_close(replica, expected[rank])
        torch.testing.assert_close(consolidated, mean)
        assert all(map(torch.equal, replica, resumed))
    assert any(not torch.equal(first, second) for first, second in zip(*expected, strict=True))
