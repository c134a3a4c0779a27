"""EMAWeightAveraging with Pipe-SGD: the running average of the true weights after each step, also of a resumed run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_pipesync import PipeSGD
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, dataset, make_strategy, train_loader, trainer, val_loader

DECAY, SAVED = 0.8, 5
#: By what is special of them: the first steps make no update, gradients are those of other weights, the last ones come
#: after the last step, they are sent within the backward pass.
CASES: dict[str, dict[str, Any]] = {
    "prediction": {},
    "late": {"staleness": 2, "delay_compensation": "none"},
    "drained": {"staleness": 2, "drain": True},
    "segments": {"pipeline_level": 2, "compression": "int8", "warmup_steps": 3},
}


def vector(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def fit(settings: dict[str, Any], folder: Path, resume: Path | None = None) -> Classifier:
    """Trains two epochs, each of which is validated; or goes on with what was saved in the first one."""
    model = Classifier()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    callbacks = [EMAWeightAveraging(decay=DECAY), saving]
    strategy = make_strategy({"name": "pipe_sgd", **settings})
    run = trainer(strategy, 2, folder, callbacks=callbacks, enable_checkpointing=True)
    run.fit(model, train_loader(), val_loader(), ckpt_path=resume)
    return model


def average(settings: dict[str, Any], batches: list[list[int]], steps_of_epoch: int) -> list[Tensor]:
    """Returns the running average after each epoch of a plain loop, of the weights after each step."""
    model = Classifier()
    optimizer = model.configure_optimizers()
    sync = PipeSGD(model, optimizer, **settings)
    running = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
    averages = []
    for number, indices in enumerate(batches, 1):
        _, x, y = dataset()[indices]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.model(x), y).backward()
        sync.step()
        running.update_parameters(model)
        if number % steps_of_epoch == 0:
            averages.append(vector(running))
    sync.detach()
    return averages


def compare(folder: Path, name: str) -> dict[str, Any]:
    settings = {key: value for key, value in CASES[name].items() if key != "drain"}
    model = fit(CASES[name], folder / name)
    resumed = fit(CASES[name], folder / f"{name} again", folder / name / f"step={SAVED}.ckpt")
    expected = average(settings, model.seen, len(model.seen) // 2)
    saved = torch.load(folder / name / f"step={SAVED}.ckpt", weights_only=True)
    return {
        "validated": model.validated_with,
        "final": vector(model),
        "resumed": vector(resumed),
        "saved": saved["state_dict"]["model.2.weight"],
        "expected": expected,
        "expected when saved": average(settings, model.seen[:SAVED], SAVED)[0],
    }


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    return launch_cases({name: partial(compare, folder, name) for name in CASES}, 2, init=False)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_average_of_the_weights_after_each_step(name: str, trained: Outcomes) -> None:
    """Bit for bit; validations see it, a checkpoint holds it, and the end has it, without drained gradients."""
    for outcome in trained[name]:
        for validated, expected in zip(outcome["validated"], outcome["expected"], strict=True):
            assert torch.equal(validated, expected)
        assert torch.equal(outcome["final"], outcome["expected"][-1])
        saved = outcome["saved"].flatten()
        assert torch.equal(saved, outcome["expected when saved"][-saved.numel() - 2 : -2]), "before the last bias"


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_has_the_same_average(name: str, trained: Outcomes) -> None:
    for outcome in trained[name]:
        assert torch.equal(outcome["resumed"], outcome["final"])
