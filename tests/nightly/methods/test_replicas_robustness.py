"""Local SGD when weights are loaded, swapped or consolidated at an awkward moment: all ranks agree afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import LocalSGD
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, loss, seeded_mlp, state

STREAMING: dict[str, Any] = {"period": 4, "overlap_steps": 3, "outer_optimizer": "nesterov", "compression": "int8"}


def global_weights(sync: LocalSGD) -> Tensor:
    return torch.cat(sync._units[0].replicas.global_weights.flats)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def load_under_an_average() -> tuple[Tensor, Tensor]:
    run = Run(LocalSGD, **STREAMING, mixing_factor=0.0)
    run.steps(range(4))
    run.model.load_state_dict(state(seeded_mlp(seed=7)))
    run.steps(range(4, 7))
    outcome = global_weights(run.sync).clone(), weights(run.model)
    run.sync.detach()
    return outcome


def test_weights_loaded_under_an_average_replace_it() -> None:
    (first, own), (second, _) = on_ranks(load_under_an_average, 2)
    assert torch.equal(first, second)
    assert (own - weights(seeded_mlp(seed=7))).abs().max() < 0.2, "three steps away"


def load_a_teacher() -> float:
    class WithTeacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = seeded_mlp(), seeded_mlp(seed=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.student(x)  # type: ignore[no-any-return]

    model = WithTeacher()
    run = Run(LocalSGD, lambda model: OPTIMIZERS["sgd"](model.student), model, period=50, outer_optimizer="nesterov")
    before = run.sync.metrics()["mib_sent"]
    for i in range(5):
        run.step(i)
        model.teacher.load_state_dict(model.student.state_dict())
    sent = run.sync.metrics()["mib_sent"] - before
    run.sync.detach()
    return sent


def test_a_teacher_is_loaded_without_a_message() -> None:
    assert on_ranks(load_a_teacher, 2) == [0, 0]


def swap_within_a_validation(swaps: bool) -> Tensor:
    run = Run(LocalSGD, period=6, outer_optimizer="nesterov")
    run.steps(range(4))
    run.sync.flush()
    if swaps:
        before = state(run.model)
        run.model.load_state_dict(state(seeded_mlp(seed=5)))
        run.model.load_state_dict(before)
    run.sync.resume()
    run.steps(range(4, 9))
    run.sync.detach()
    return weights(run.model)


def test_weights_swapped_in_a_validation_and_back_change_nothing() -> None:
    swapped, expected = (on_ranks(swap_within_a_validation, 2, swaps) for swaps in (True, False))
    assert all(map(torch.equal, swapped, expected))


def resume_with(settings: dict[str, Any]) -> tuple[tuple[str, str] | None, Tensor, Tensor]:
    """Saves after five steps, resumes with other settings, and trains on."""
    run = Run(LocalSGD, **STREAMING)
    run.steps(range(5))
    run.sync.flush()
    saved, own = state(run.model), copy.deepcopy(run.sync.state_dict())
    run.sync.detach()
    run = Run(LocalSGD, "sgd", seeded_mlp(1), **{**STREAMING, **settings})
    run.model.load_state_dict(saved)
    refused = raised(lambda: run.sync.load_state_dict(own))
    run.steps(range(5, 13))
    run.sync.flush()
    outcome = refused, global_weights(run.sync).clone(), weights(run.model)
    run.sync.detach()
    return outcome


@pytest.mark.parametrize("settings", [{"overlap_steps": 0}, {"period": 3}, {"warmup_steps": 8}], ids=str)
def test_a_run_resumed_with_other_settings_agrees_or_is_refused(settings: dict[str, Any]) -> None:
    (refused, first, own), (_, other, others) = on_ranks(resume_with, 2, settings)
    assert torch.equal(first, other)
    assert torch.equal(own, others)
    assert (refused is not None) == ("warmup_steps" in settings)
    assert refused is None or "warmup_steps" in refused[1]


def rewind_into_the_warm_up() -> tuple[bool, Tensor, Tensor]:
    run = Run(LocalSGD, period=3, warmup_steps=4, outer_optimizer="nesterov", compression="int8")
    run.steps(range(2))
    run.sync.flush()
    saved, own = state(run.model), copy.deepcopy(run.sync.state_dict())
    run.sync.resume()
    run.steps(range(2, 9))
    run.sync.flush()
    run.model.load_state_dict(saved)
    run.sync.load_state_dict(own)
    run.steps(range(2, 4))
    in_warm_up, diverged = weights(run.model), run.sync.diverged
    run.steps(range(4, 10))
    outcome = diverged, in_warm_up, global_weights(run.sync).clone()
    run.sync.detach()
    return outcome


def test_a_run_rewound_into_its_warm_up_is_synchronous_again() -> None:
    (diverged, own, first), (_, others, second) = on_ranks(rewind_into_the_warm_up, 2)
    assert not diverged
    assert torch.equal(own, others)
    assert torch.equal(first, second)


def consolidate_in_inference_mode(settings: dict[str, Any]) -> None:
    run = Run(LocalSGD, **settings)
    for first in (0, 5, 10):
        run.steps(range(first, first + 5))
        with torch.inference_mode():
            run.sync.flush()
        run.sync.resume()
    run.sync.detach()


@pytest.mark.parametrize("settings", [{"period": 8}, STREAMING], ids=str)
def test_weights_are_consolidated_in_inference_mode(settings: dict[str, Any]) -> None:
    on_ranks(consolidate_in_inference_mode, 2, settings)


def thaw_in_the_warm_up() -> tuple[str, str] | None:
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    sync = LocalSGD(model, optimizer, warmup_steps=5)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    loss(model, 0, dist.get_rank()).backward()
    outcome = raised(sync.step)
    sync.detach()
    return outcome


def test_layers_thawed_in_the_warm_up_are_refused() -> None:
    for outcome in on_ranks(thaw_in_the_warm_up, 2):
        assert_raised(outcome, "RuntimeError", "warmup_steps=0")
