"""MuLoCo, as local SGD, int2 and torch's Muon compose it, on real processes against its one page, bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync import LocalSGD
from lightning_pipesync.training.presets import PRESETS
from tests.nightly.methods.test_local_sgd_sparse import loss, network
from tests.references.muloco import muon_and_adamw, simulate
from tests.support.case_table import launch_cases
from tests.support.models import assert_same, state

STEPS, PERIOD, RESUMED = 11, 3, 5


def train(resumes: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Returns this rank's weights, and the factors on the learning rates of both optimizers."""

    def begin(model: nn.Module) -> tuple[nn.Module, list[Optimizer], LocalSGD]:
        optimizers = muon_and_adamw(model)
        return model, optimizers, LocalSGD(model, optimizers, **{**PRESETS["muloco"].settings, "period": PERIOD})

    model, optimizers, sync = begin(network())
    for step in range(STEPS):
        if step == RESUMED and resumes:
            sync.flush()
            weights, saved = state(model), copy.deepcopy(sync.state_dict())
            sync.detach()
            model, optimizers, sync = begin(network(1))
            model.load_state_dict(weights)
            sync.load_state_dict(saved)
        loss(model, step, dist.get_rank()).backward()
        for optimizer in optimizers:
            sync.step(optimizer=optimizer)
            optimizer.zero_grad()
    own = state(model)
    sync.detach()
    return own, [unit.lr_scale for unit in sync._units]


@pytest.mark.parametrize("world_size", [2, 3])
def test_follows_the_paper(world_size: int) -> None:
    """Also resumed within a round."""
    outcomes = launch_cases({resumes: partial(train, resumes) for resumes in (False, True)}, world_size)
    replicas = simulate(network(), loss, world_size=world_size, num_steps=STEPS, period=PERIOD)
    for resumes in (False, True):
        for rank, (own, _) in enumerate(outcomes[resumes]):
            assert_same(own, replicas[rank].state_dict(), f"resumed {resumes}, rank {rank}")


def scales() -> list[float]:
    """Returns the factors on the learning rates of Muon and AdamW by default, after steps on this rank's batches."""
    model = network()
    optimizers = muon_and_adamw(model)
    sync = LocalSGD(model, optimizers, period=100)
    for step in range(20):
        loss(model, step, dist.get_rank()).backward()
        for optimizer in optimizers:
            sync.step(optimizer=optimizer)
            optimizer.zero_grad()
    found = [unit.lr_scale for unit in sync._units]
    sync.detach()
    return found


def test_muons_steps_are_as_long_on_a_rank_alone() -> None:
    """Whatever the noise of its batches, as a step is orthogonal; AdamW's are not."""
    for of_muon, of_adamw in launch_cases({"": scales}, 2)[""]:
        assert of_muon == 1
        assert 1 < of_adamw <= 2**0.5


def orthogonal_steps(scale: float) -> Tensor:
    model = network()
    muon, _ = muon_and_adamw(model)
    before = [p.detach().clone() for p in muon.param_groups[0]["params"]]
    muon.param_groups[0]["weight_decay"] = 0.0
    for p in muon.param_groups[0]["params"]:
        p.grad = scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    muon.step()
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(muon.param_groups[0]["params"], before, strict=True)])


def test_a_step_of_muon_has_one_length() -> None:
    """Which is why the factor on its learning rate is 1."""
    small, large = orthogonal_steps(1e-2), orthogonal_steps(1e2)
    assert small.norm() == pytest.approx(large.norm().item(), rel=0.01)
