"""Local SGD when weights are loaded, swapped or consolidated at an awkward moment: all ranks agree afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import LocalSGD
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, loss, seeded_mlp, state

STREAMING: dict[str, Any] = {"period": 4, "overlap_steps": 3, "outer_optimizer": "nesterov", "compression": "int8"}


def begin(seed: int = 0, **settings: Any) -> tuple[nn.Module, LocalSGD, Callable[[range], None]]:
    """Returns a model, its training, and a function that takes steps."""
    model = seeded_mlp(seed)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, timeout_s=30, **settings)

    def train(steps: range) -> None:
        for i in steps:
            optimizer.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            sync.step()

    return model, sync, train


def agreed(sync: LocalSGD) -> Tensor:
    return torch.cat(sync._units[0].replicas.agreed.flats)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def load_under_an_average() -> tuple[Tensor, Tensor]:
    model, sync, train = begin(**STREAMING, own_share=0.0)
    train(range(4))
    model.load_state_dict(state(seeded_mlp(seed=7)))
    train(range(4, 7))
    outcome = agreed(sync).clone(), weights(model)
    sync.detach()
    return outcome


def test_weights_loaded_under_an_average_replace_it() -> None:
    (first, own), (second, _) = launch(load_under_an_average, 2)
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
    optimizer = OPTIMIZERS["sgd"](model.student)
    sync = LocalSGD(model, optimizer, period=50, outer_optimizer="nesterov")
    sent = sync.metrics()["mib_sent"]
    for i in range(5):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
        model.teacher.load_state_dict(model.student.state_dict())
    sent = sync.metrics()["mib_sent"] - sent
    sync.detach()
    return sent


def test_a_teacher_is_loaded_without_a_message() -> None:
    assert launch(load_a_teacher, 2) == [0, 0]


def swap_within_a_validation(swaps: bool) -> Tensor:
    model, sync, train = begin(period=6, outer_optimizer="nesterov")
    train(range(4))
    sync.flush()
    if swaps:
        before = state(model)
        model.load_state_dict(state(seeded_mlp(seed=5)))
        model.load_state_dict(before)
    sync.resume()
    train(range(4, 9))
    sync.detach()
    return weights(model)


def test_weights_swapped_in_a_validation_and_back_change_nothing() -> None:
    for swapped, expected in zip(*(launch(swap_within_a_validation, 2, swaps) for swaps in (True, False)), strict=True):
        assert torch.equal(swapped, expected)


def resume_with(first: dict[str, Any], second: dict[str, Any]) -> tuple[tuple[str, str] | None, Tensor, Tensor]:
    """Saves after five steps, resumes with other settings, and trains on."""
    model, sync, train = begin(**{**STREAMING, **first})
    train(range(5))
    sync.flush()
    saved, own = state(model), copy.deepcopy(sync.state_dict())
    sync.detach()
    model, sync, train = begin(1, **{**STREAMING, **second})
    model.load_state_dict(saved)
    refused = raised(lambda: sync.load_state_dict(own))
    train(range(5, 13))
    sync.flush()
    outcome = refused, agreed(sync).clone(), weights(model)
    sync.detach()
    return outcome


def test_a_run_resumed_with_other_settings_agrees_or_is_refused() -> None:
    for second in ({"overlap_steps": 0}, {"period": 3}, {"warmup_steps": 8}):
        (refused, first, own), (_, other, others) = launch(resume_with, 2, {}, second)
        assert torch.equal(first, other)
        assert torch.equal(own, others)
        assert (refused is not None) == ("warmup_steps" in second)
        assert refused is None or "warmup_steps" in refused[1]


def rewind_into_the_warm_up() -> tuple[bool, Tensor, Tensor]:
    model, sync, train = begin(period=3, warmup_steps=4, outer_optimizer="nesterov", compression="int8")
    train(range(2))
    sync.flush()
    saved, own = state(model), copy.deepcopy(sync.state_dict())
    sync.resume()
    train(range(2, 9))
    sync.flush()
    model.load_state_dict(saved)
    sync.load_state_dict(own)
    train(range(2, 4))
    in_warm_up, diverged = weights(model), sync.diverged
    train(range(4, 10))
    outcome = diverged, in_warm_up, agreed(sync).clone()
    sync.detach()
    return outcome


def test_a_run_rewound_into_its_warm_up_is_synchronous_again() -> None:
    (diverged, own, first), (_, others, second) = launch(rewind_into_the_warm_up, 2)
    assert not diverged
    assert torch.equal(own, others)
    assert torch.equal(first, second)


def consolidate_in_inference_mode() -> tuple[str, str] | None:
    def train_and_evaluate() -> None:
        for settings in ({"period": 8}, STREAMING):
            _, sync, train = begin(**settings)
            for first in (0, 5, 10):
                train(range(first, first + 5))
                with torch.inference_mode():
                    sync.flush()
                sync.resume()
            sync.detach()

    return raised(train_and_evaluate)


def test_weights_are_consolidated_in_inference_mode() -> None:
    assert launch(consolidate_in_inference_mode, 2) == [None, None]


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
    for outcome in launch(thaw_in_the_warm_up, 2):
        assert outcome is not None
        assert outcome[0] == "RuntimeError"
        assert "warmup_steps=0" in outcome[1]
