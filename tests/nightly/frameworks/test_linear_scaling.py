"""Linear scaling with gradual warm-up: any schedule under it, resumed runs, a Trainer."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lightning_pipesync import LinearScalingLR
from tests.support.case_table import launch_cases
from tests.support.lightning_models import Classifier, fit
from tests.support.models import assert_same, loss, seeded_mlp, state

SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler | None]] = {
    "none": lambda _: None,
    "steps": lambda optimizer: StepLR(optimizer, 3, 0.1),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "lambda from 0": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 2)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9, eta_min=1e-4),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 4),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, [0.3, 0.06], total_steps=12),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.9)], [4]
    ),
    "chained": lambda optimizer: ChainedScheduler([StepLR(optimizer, 3, 0.5), ExponentialLR(optimizer, 0.9)]),
}


def in_groups(model: nn.Module, lr: Any = 0.1) -> SGD:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return SGD([{"params": weights}, {"params": biases, "lr": 0.02}], lr=lr, momentum=0.9)


def train(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, steps: range) -> list[list[float]]:
    """Returns the learning rates of each step."""
    rates = []
    for step in steps:
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.zero_grad()
        loss(model, step, rank=0).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


def begin(schedule: str, factor: float = 3) -> tuple[nn.Module, Optimizer, LinearScalingLR]:
    model = seeded_mlp()
    optimizer = in_groups(model)
    return model, optimizer, LinearScalingLR(optimizer, 4, factor, SCHEDULES[schedule](optimizer))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_is_scaled_and_resumes(schedule: str) -> None:
    """Its learning rates are those that it has alone, times the scale, bit for bit; also resumed at any time."""
    alone = seeded_mlp()
    own = in_groups(alone)
    expected = train(alone, own, SCHEDULES[schedule](own), range(11))
    scales = [1.0, 1.5, 2.0, 2.5] + [3.0] * 7
    expected = [[rate * scale for rate in both] for both, scale in zip(expected, scales, strict=True)]
    files, parts = {}, begin(schedule)
    for step in range(11):
        if step in (2, 4, 7):
            files[step] = io.BytesIO()
            torch.save([part.state_dict() for part in parts], files[step])
        assert train(*parts, range(step, step + 1)) == [expected[step]]
    assert [group["momentum"] for group in parts[1].param_groups] == [group["momentum"] for group in own.param_groups]
    for step, file in files.items():
        file.seek(0)
        resumed = begin(schedule)
        for part, saved in zip(resumed, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(saved)
        assert train(*resumed, range(step, 11)) == expected[step:]
        assert_same(state(resumed[0]), state(parts[0]))


def test_half_the_batch_and_no_warm_up() -> None:
    optimizer = in_groups(seeded_mlp())
    LinearScalingLR(optimizer, warmup_steps=0, factor=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]


def test_another_factor_holds_from_the_next_step_on() -> None:
    """As many steps, and twice as many ranks: the learning rates of the new run."""
    saved, resumed = begin("none", factor=4), begin("none", factor=8)
    train(*saved, range(5))
    for part, other in zip(resumed, saved, strict=True):
        part.load_state_dict(other.state_dict())
    assert resumed[2].last_epoch == 5
    assert train(*resumed, range(5, 7))[1] == [0.8, 0.16]


def test_what_others_change_stays_changed() -> None:
    """A plateau halves the learning rates, in the warm-up and after it; a group that is added is scaled, too."""
    model, optimizer, scheduler = begin("none", factor=5)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    plateau.step(1.0)
    rates = []
    for step in range(7):
        rates += train(model, optimizer, scheduler, range(step, step + 1))
        if step in (1, 5):
            plateau.step(1.0)
    assert [rate for rate, _ in rates] == pytest.approx([0.1, 0.2, 0.15, 0.2, 0.25, 0.25, 0.125])
    model, optimizer, scheduler = begin("none", factor=5)
    train(model, optimizer, scheduler, range(1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.2})
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.3, 0.06, 0.3])


def test_learning_rates_that_are_tensors_stay_the_same_tensors() -> None:
    optimizer = in_groups(seeded_mlp(), torch.tensor(0.1))
    held = optimizer.param_groups[0]["lr"]
    scheduler = LinearScalingLR(optimizer, 2, 4, ExponentialLR(optimizer, 0.5))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.1 * 0.5 * 2.5)


def test_what_is_refused() -> None:
    optimizer, other = in_groups(seeded_mlp()), in_groups(seeded_mlp())
    wrong: dict[str, dict[str, Any]] = {
        "warmup_steps must be .* got -1": {"warmup_steps": -1, "factor": 2},
        "warmup_steps must be .* got 1.5": {"warmup_steps": 1.5, "factor": 2},
        "factor must be .* got 0": {"warmup_steps": 1, "factor": 0},
        "factor must be .* got inf": {"warmup_steps": 1, "factor": float("inf")},
        "init_process_group": {"warmup_steps": 1},
        "step it beside this one": {"warmup_steps": 1, "factor": 2, "scheduler": ReduceLROnPlateau(optimizer)},
        "StepLR belongs to another": {"warmup_steps": 1, "factor": 2, "scheduler": StepLR(other, 1)},
    }
    for words, settings in wrong.items():
        with pytest.raises(ValueError, match=words):
            LinearScalingLR(optimizer, **settings)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    with pytest.raises(ValueError, match="saved state has no schedule"):
        begin("steps")[2].load_state_dict(begin("none")[2].state_dict())


class Scaled(Classifier):
    """As many times the learning rate as there are ranks, after ten steps; records the rates in place of samples."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = LinearScalingLR(optimizer, warmup_steps=10, scheduler=CosineAnnealingLR(optimizer, 16))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.optimizers().param_groups[0]["lr"])


def test_in_a_trainer(folder: Path) -> None:
    """The number of ranks is the factor; a run resumed within the warm-up is the uninterrupted one bit for bit."""
    saver, saved = ModelCheckpoint(folder, "{epoch}", save_top_k=-1), folder / "epoch=0.ckpt"
    run = partial(fit, folder, "dear", make=Scaled)
    cases = {"whole": partial(run, callbacks=[saver], enable_checkpointing=True), "resumed": partial(run, resume=saved)}
    outcomes = launch_cases(cases, 2, init=False)
    whole, resumed = outcomes["whole"][0], outcomes["resumed"][0]
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    alone = train(seeded_mlp(), optimizer, CosineAnnealingLR(optimizer, 16), range(16))
    rates = [rate * (1 + min(step, 10) / 10) for step, (rate,) in enumerate(alone)]
    assert whole["seen"][::2] == pytest.approx(rates)
    assert resumed["seen"][::2] == whole["seen"][16::2]
    assert torch.equal(resumed["weights"], whole["weights"])
