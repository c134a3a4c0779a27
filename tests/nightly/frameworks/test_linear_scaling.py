"""Linear scaling with gradual warm-up: values by hand, any schedule under it, resumed runs, a Trainer."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
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
from tests.support.lightning_models import Classifier, train_loader, trainer
from tests.support.models import loss, seeded_mlp

SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler | None]] = {
    "none": lambda _: None,
    "steps": lambda optimizer: StepLR(optimizer, 3, 0.1),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
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


def test_values() -> None:
    """Four times the batch, a warm-up of three steps: times 1, 2, 3, 4, 4 in each group; half the batch, and none."""
    model = seeded_mlp()
    optimizer = in_groups(model)
    scheduler = LinearScalingLR(optimizer, warmup_steps=3, factor=4)
    rates = train(model, optimizer, scheduler, range(5))
    assert torch.allclose(
        torch.tensor(rates).T, torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.4], [0.02, 0.04, 0.06, 0.08, 0.08]])
    )
    assert scheduler.base_lrs == [0.1, 0.02]
    assert scheduler.get_last_lr() == [0.4, 0.08]
    optimizer = in_groups(seeded_mlp())
    LinearScalingLR(optimizer, warmup_steps=0, factor=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_is_scaled(schedule: str) -> None:
    """Its learning rates at every step are those that it has alone, times the scale, bit for bit."""
    (alone, own), (model, optimizer) = ((model, in_groups(model)) for model in (seeded_mlp(), seeded_mlp()))
    expected = train(alone, own, SCHEDULES[schedule](own), range(11))
    scheduler = LinearScalingLR(optimizer, warmup_steps=4, factor=3, scheduler=SCHEDULES[schedule](optimizer))
    rates = train(model, optimizer, scheduler, range(11))
    scales = [1.0, 1.5, 2.0, 2.5] + [3.0] * 7
    assert rates == [[rate * scale for rate in both] for both, scale in zip(expected, scales, strict=True)]
    assert [group["momentum"] for group in optimizer.param_groups] == [group["momentum"] for group in own.param_groups]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("saved", [2, 4, 7], ids="after {} steps".format)
def test_a_resumed_run_is_the_uninterrupted_one(schedule: str, saved: int) -> None:
    def begin() -> tuple[nn.Module, Optimizer, LinearScalingLR]:
        model = seeded_mlp()
        optimizer = in_groups(model)
        return model, optimizer, LinearScalingLR(optimizer, 4, 3, SCHEDULES[schedule](optimizer))

    parts, file = begin(), io.BytesIO()
    train(*parts, range(saved))
    torch.save([part.state_dict() for part in parts], file)
    rates = train(*parts, range(saved, 11))
    file.seek(0)
    resumed = begin()
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert train(*resumed, range(saved, 11)) == rates
    for value, expected in zip(resumed[0].parameters(), parts[0].parameters(), strict=True):
        assert torch.equal(value, expected)


def test_another_factor_holds_from_the_next_step_on() -> None:
    """As many steps, and twice as many ranks: the learning rates of the new run."""
    first, second = (in_groups(seeded_mlp()) for _ in range(2))
    saved, resumed = LinearScalingLR(first, 2, factor=4), LinearScalingLR(second, 2, factor=8)
    for _ in range(3):
        first.step()
        saved.step()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(saved.state_dict())
    assert resumed.last_epoch == 3
    second.step()
    resumed.step()
    assert resumed.get_last_lr() == [0.8, 0.16]


def test_what_others_change_stays_changed() -> None:
    """A plateau halves the learning rates, in the warm-up and after it."""
    model = seeded_mlp()
    optimizer = in_groups(model)
    scheduler = LinearScalingLR(optimizer, warmup_steps=4, factor=5)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    plateau.step(1.0)
    rates = []
    for step in range(7):
        rates += train(model, optimizer, scheduler, range(step, step + 1))
        if step in (1, 5):
            plateau.step(1.0)
    assert [rate for rate, _ in rates] == pytest.approx([0.1, 0.2, 0.15, 0.2, 0.25, 0.25, 0.125])


def test_a_group_that_is_added() -> None:
    """Its learning rate is one that is shown, as those of the others are."""
    optimizer = in_groups(seeded_mlp())
    scheduler = LinearScalingLR(optimizer, warmup_steps=4, factor=5)
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.2})
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.3, 0.06, 0.3])


def test_learning_rates_that_are_tensors_stay_the_same_tensors() -> None:
    lr = torch.tensor(0.1)
    optimizer = in_groups(seeded_mlp(), lr)
    held = optimizer.param_groups[0]["lr"]
    scheduler = LinearScalingLR(optimizer, 2, 4, ExponentialLR(optimizer, 0.5))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.1 * 0.5 * 2.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": -1, "factor": 2}, "warmup_steps must be .* got -1"),
        ({"warmup_steps": 1.5, "factor": 2}, "warmup_steps must be .* got 1.5"),
        ({"warmup_steps": 1, "factor": 0}, "factor must be a positive number, got 0"),
        ({"warmup_steps": 1, "factor": float("inf")}, "factor must be a positive number, got inf"),
        ({"warmup_steps": 1}, "init_process_group"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    optimizer = in_groups(seeded_mlp())
    with pytest.raises(ValueError, match=words):
        LinearScalingLR(optimizer, **settings)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]


def test_which_schedules_are_refused() -> None:
    optimizer, other = in_groups(seeded_mlp()), in_groups(seeded_mlp())
    with pytest.raises(ValueError, match="step it beside this one"):
        LinearScalingLR(optimizer, 1, 2, ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="StepLR belongs to another optimizer"):
        LinearScalingLR(optimizer, 1, 2, StepLR(other, 1))
    plain, with_schedule = LinearScalingLR(other, 1, 2), LinearScalingLR(optimizer, 1, 2, StepLR(optimizer, 1))
    with pytest.raises(ValueError, match="saved state has no schedule"):
        with_schedule.load_state_dict(plain.state_dict())


class Scaled(Classifier):
    """As many times the learning rate as there are ranks, after ten steps."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.01, momentum=0.9)
        scheduler = LinearScalingLR(optimizer, warmup_steps=10, scheduler=CosineAnnealingLR(optimizer, 16))
        self.rates: list[float] = []
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def fit(directory: Path, resumed: bool) -> tuple[list[float], Tensor]:
    """Trains two epochs of eight steps on two ranks, with a checkpoint after the first."""
    model, saver = Scaled(), ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    fitting = trainer("dear", 2, directory, callbacks=[saver], enable_checkpointing=True)
    fitting.fit(model, train_loader(), ckpt_path=directory / "epoch=0.ckpt" if resumed else None)
    return model.rates, model.weights()


def test_in_a_trainer(tmp_path: Path) -> None:
    """The number of ranks is the factor; a run resumed within the warm-up is the uninterrupted one bit for bit."""
    fits = launch_cases({resumed: partial(fit, tmp_path, resumed) for resumed in (False, True)}, 2, init=False)
    [(whole, weights), _], [(second, resumed), _] = fits[False], fits[True]
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    cosine, alone = CosineAnnealingLR(optimizer, 16), []
    for _ in range(16):
        alone.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert whole == pytest.approx([rate * (1 + min(step, 10) / 10) for step, rate in enumerate(alone)])
    assert second == whole[8:]
    assert torch.equal(resumed, weights)
