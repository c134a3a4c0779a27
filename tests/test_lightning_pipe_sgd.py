"""`Trainer(strategy="pipe_sgd")` on real processes against `strategy="ddp"` with a callback that delays gradients."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_pipesync.methods.pipe_sgd import PipeSGD
from tests.harness import launch
from tests.lightning_models import (
    Classifier,
    dataset,
    fit,
    fit_on,
    make_strategy,
    scaling,
    train_loader,
    trainer,
    val_loader,
)
from tests.test_lightning_dear import assert_same, fine_tune, fit_averaged

PIPE_SGD = {"name": "pipe_sgd"}
#: As in the paper.
DELAYED = {**PIPE_SGD, "delay_compensation": "none"}


class Delay(pl.Callback):
    """Puts the gradients of k steps before in the place of those that DDP has averaged."""

    def __init__(self, staleness: int, drain: bool = False) -> None:
        self.staleness, self.drain = staleness, drain
        self.in_flight: list[list[Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: Any, module: pl.LightningModule, optimizer: Any) -> None:
        parameters = list(module.parameters())
        self.in_flight.append([None if p.grad is None else p.grad.clone() for p in parameters])
        waiting = len(self.in_flight) > self.staleness
        oldest = self.in_flight.pop(0) if waiting else [None] * len(parameters)
        for parameter, gradient in zip(parameters, oldest, strict=True):
            parameter.grad = gradient

    def on_train_end(self, trainer: Any, module: pl.LightningModule) -> None:
        for gradients in self.in_flight if self.drain else []:
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(module.parameters(), trainer.gradient_clip_val)
            trainer.optimizers[0].step()


@pytest.mark.parametrize(
    ("settings", "module", "arguments"),
    [
        ({"staleness": 2}, {"optimizer": "adamw", "dropout": 0.2}, {"val_check_interval": 0.5}),
        ({"pipeline_level": 2}, {"optimizer": "sgd"}, {"accumulate_grad_batches": 3}),
        ({"staleness": 3, "drain": True}, {"optimizer": "adamw"}, {"gradient_clip_val": 0.1}),
    ],
    ids=["k=2", "level 2", "drained"],
)
def test_is_ddp_delayed(settings: dict[str, Any], module: dict[str, Any], arguments: dict[str, Any], tmp_path: Path):
    delay = Delay(settings.get("staleness", 1), settings.get("drain", False))
    expected = fit_on(2, tmp_path, "ddp", module, callbacks=[delay], **arguments)
    actual = fit_on(2, tmp_path, {**DELAYED, **settings}, module, **arguments)
    assert_same(actual, expected)
    metrics, steps = actual[0]["metrics"], actual[0]["steps"]
    assert metrics["pipe_sgd/updates"] == steps - settings.get("staleness", 1)
    assert metrics["pipe_sgd/staleness"] == settings.get("staleness", 1)
    assert metrics["pipe_sgd/mib_sent"] > 0


def fit_and_replay(settings: dict[str, Any], arguments: dict[str, Any], directory: Path) -> tuple[Tensor, Tensor]:
    """Returns the weights of a Trainer, and of a loop over the same batches."""
    model = Classifier(optimizer="adamw", batch_norm=True)
    copy = deepcopy(model)
    trainer(make_strategy({**PIPE_SGD, **settings}), 2, directory, **arguments).fit(model, train_loader(), val_loader())
    optimizer = copy.configure_optimizers()
    sync = PipeSGD(copy, optimizer, **settings)
    accumulate = arguments.get("accumulate_grad_batches", 1)
    for index, indices in enumerate(model.seen):
        _, x, y = dataset()[indices]
        with sync.no_sync() if (index + 1) % accumulate else nullcontext():
            (nn.functional.cross_entropy(copy.model(x), y) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if "gradient_clip_val" in arguments:
                sync.clip(arguments["gradient_clip_val"])
            sync.step()
            optimizer.zero_grad()
    sync.flush()
    sync.detach()
    return model.weights(), copy.weights()


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"val_check_interval": 0.5}),
        ({"pipeline_level": 2}, {"accumulate_grad_batches": 2, "val_check_interval": 3}),
    ],
    ids=["k=1", "accumulation, validation in between"],
)
def test_prediction_is_that_of_a_loop(settings: dict[str, Any], arguments: dict[str, Any], tmp_path: Path) -> None:
    """Which a simulation is compared to."""
    outcomes = launch(fit_and_replay, 2, settings, arguments, tmp_path, init=False)
    for weights, replayed in outcomes:
        assert torch.equal(weights, replayed)
        assert torch.equal(weights, outcomes[0][0])


class Differing(pl.Callback):
    """Counts where the ranks hold different weights."""

    def __init__(self) -> None:
        self.differing = 0

    def look(self, trainer: Any, parameters: Iterable[Tensor]) -> None:
        weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        of_ranks = trainer.strategy.method.transport.gather_objects(weights)
        self.differing += not torch.equal(of_ranks[0], of_ranks[1])

    def on_train_batch_start(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        self.look(trainer, module.parameters())

    def on_before_optimizer_step(self, trainer: Any, module: pl.LightningModule, optimizer: Any) -> None:
        self.look(trainer, optimizer.param_groups[0]["params"])

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        self.look(trainer, module.parameters())

    def on_validation_batch_start(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        self.look(trainer, module.parameters())


def fit_and_compare(manual: bool, directory: Path) -> tuple[int, int]:
    """Returns how often callbacks found other weights on the other rank, and how often a training step did."""
    model, callback, within = TwoOptimizers() if manual else Classifier(), Differing(), []
    forward = model.model[0].forward

    def look(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            of_ranks = run.strategy.method.transport.gather_objects(model.model[0][0].weight.detach())
            within.append(not torch.equal(of_ranks[0], of_ranks[1]))
        return forward(x)

    model.model[0].forward = look
    run = trainer(make_strategy(PIPE_SGD), 2, directory, callbacks=[callback], val_check_interval=0.5)
    run.fit(model, train_loader(), val_loader())
    return callback.differing, sum(within)


@pytest.mark.parametrize("manual", [False, True])
def test_who_finds_predicted_weights(manual: bool, tmp_path: Path) -> None:
    """A forward pass of the training does. Callbacks find the same weights on all ranks, at any time."""
    for in_callbacks, in_forward in launch(fit_and_compare, 2, manual, tmp_path, init=False):
        assert in_callbacks == 0
        assert in_forward > 10


def test_running_average_of_the_weights(tmp_path: Path) -> None:
    expected = launch(partial(fit_averaged, "ddp", tmp_path, Delay(1)), 2, init=False)
    assert_same(launch(partial(fit_averaged, DELAYED, tmp_path), 2, init=False), expected)


@pytest.mark.parametrize("level", [1, 2])
def test_fine_tuning(level: int, tmp_path: Path) -> None:
    ddp, strategy = "ddp_find_unused_parameters_true", {**DELAYED, "pipeline_level": level}
    expected = launch(partial(fine_tune, ddp, tmp_path, Delay(1)), 2, init=False)
    for actual, reference in zip(launch(partial(fine_tune, strategy, tmp_path), 2, init=False), expected, strict=True):
        assert torch.equal(actual[0], reference[0])
        assert all(torch.equal(a, b) for a, b in zip(actual[1], reference[1], strict=True))


class NormSeen(Classifier):
    """Records the norm of the gradient before each update, and the learning rate that the schedule has reached."""

    def __init__(self) -> None:
        super().__init__(scheduler=True)
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def fit_and_look(strategy: Any, directory: Path) -> tuple[list[float], list[float]]:
    model = NormSeen()
    trainer(make_strategy(strategy), 2, directory).fit(model, train_loader(), val_loader())
    return model.norms, model.rates


def test_hooks_see_the_gradient_that_is_about_to_be_applied(tmp_path: Path) -> None:
    outcomes = launch(fit_and_look, 2, {**PIPE_SGD, "staleness": 2}, tmp_path, init=False)
    norms, rates = outcomes[0]
    assert outcomes[1] == (norms, rates)
    assert norms[:2] == [0.0, 0.0]
    assert all(norm > 0 for norm in norms[2:])
    assert rates == launch(fit_and_look, 2, "ddp", tmp_path, init=False)[0][1], "schedules count steps, as ever"


def fit_scaled(strategy: Any, directory: Path, scale: float) -> dict[str, Any]:
    plugin = scaling()
    assert plugin.scaler is not None
    plugin.scaler._init_scale = scale
    callbacks = [Delay(1)] if strategy == "ddp" else []
    result = fit(directory, strategy, {"optimizer": "sgd"}, plugins=[plugin], callbacks=callbacks)
    return {**result, "scale": plugin.scaler.get_scale()}


def test_loss_scaling(tmp_path: Path) -> None:
    expected = launch(partial(fit_scaled, "ddp", tmp_path, 2.0**10), 2, init=False)
    actual = launch(partial(fit_scaled, DELAYED, tmp_path, 2.0**10), 2, init=False)
    assert_same(actual, expected, exact=False)
    unscaled, scaled = (launch(partial(fit_scaled, PIPE_SGD, tmp_path, scale), 2, init=False) for scale in (1, 2.0**10))
    assert_same(scaled, unscaled, exact=False)


def test_an_overflow_is_one_for_all(tmp_path: Path) -> None:
    """The scale overflows at first, and is the same on all ranks at the end."""
    actual = launch(partial(fit_scaled, PIPE_SGD, tmp_path, 2.0**24), 2, init=False)
    assert torch.equal(actual[0]["weights"], actual[1]["weights"])
    assert torch.isfinite(actual[0]["weights"]).all()
    assert actual[0]["scale"] == actual[1]["scale"] < 2.0**24
    assert 0 < actual[0]["metrics"]["pipe_sgd/updates"] < actual[0]["steps"] - 1


def run_on(strategy: Any, directory: Path, path: Path | None, steps: int, scaled: bool = False) -> dict[str, Any]:
    """Saves after every step."""
    model = Classifier(optimizer="adamw", batch_norm=True, scheduler=True)
    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    arguments: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": steps}
    if scaled:
        arguments["plugins"] = [scaling()]
    run = trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    lost = [str(one.message).partition("The checkpoint is of 2 ranks, and there are 1: ")[2] for one in caught]
    updates = float(run.callback_metrics.get("pipe_sgd/updates", -1))
    return {"weights": model.weights(), "steps": run.global_step, "updates": updates, "lost": list(filter(None, lost))}


@pytest.mark.parametrize(
    ("settings", "scaled", "at"),
    [({"staleness": 2, "compression": "int8"}, False, 8), ({}, True, 3)],
    ids=["k=2, int8", "16-mixed"],
)
def test_a_resumed_run_is_the_uninterrupted_one(settings: dict[str, Any], scaled: bool, at: int, tmp_path: Path):
    """In mid-epoch and at the end of one."""
    strategy = {**PIPE_SGD, **settings}
    whole = launch(partial(run_on, strategy, tmp_path / "whole", None, 12, scaled), 2, init=False)
    path = tmp_path / "whole" / f"step={at}.ckpt"
    assert torch.load(path, weights_only=True)["pipesync"]["world_size"] == 2
    resumed = launch(partial(run_on, strategy, tmp_path / "resumed", path, 12, scaled), 2, init=False)
    for one, other in zip(resumed, whole, strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["steps"] == other["steps"] == 12
        assert one["updates"] == other["updates"]


def test_checkpoints_interchange_with_ddp(tmp_path: Path) -> None:
    """Weights and optimizer; the pipeline fills anew."""
    launch(partial(run_on, PIPE_SGD, tmp_path / "pipe_sgd", None, 8), 2, init=False)
    launch(partial(run_on, "ddp", tmp_path / "ddp", None, 8), 2, init=False)
    for first, second, world_size in ((PIPE_SGD, "ddp", 2), ("ddp", PIPE_SGD, 2), (PIPE_SGD, PIPE_SGD, 1)):
        path = tmp_path / ("ddp" if first == "ddp" else "pipe_sgd") / "step=8.ckpt"
        directory = tmp_path / f"on {world_size}"
        for outcome in launch(partial(run_on, second, directory, path, 12), world_size, init=False):
            assert outcome["steps"] == 12
            assert outcome["updates"] == (-1 if second == "ddp" else 3)
            dropped = ["gradients that were on their way are dropped, and the pipeline fills anew."]
            assert outcome["lost"] == (dropped if world_size == 1 else [])


class TwoOptimizers(Classifier):
    """As a GAN: manual optimization, one optimizer after the other, clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.model[0], self.model[2])]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        _, x, y = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.model(x), y))
            self.clip_gradients(optimizer, gradient_clip_val=0.05)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def fit_manually_scaled(directory: Path) -> tuple[Tensor, list[float]]:
    model, plugin = TwoOptimizers(), scaling()
    assert plugin.scaler is not None
    plugin.scaler._init_scale, plugin.scaler._growth_interval = 2.0**10, 5
    run = trainer(make_strategy(PIPE_SGD), 2, directory, plugins=[plugin])
    scales: list[float] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            scales.append(run.strategy.method._pipes[0].pipeline.in_flight[-1].loss_scale)

    run.callbacks.append(Look())
    run.fit(model, train_loader(), val_loader())
    return model.weights(), scales


def test_clipping_by_hand_knows_the_loss_scale(tmp_path: Path) -> None:
    outcomes = launch(fit_manually_scaled, 2, tmp_path, init=False)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1][0] == 2.0**10
    assert outcomes[0][1][-1] > 2.0**10


def fit_manually(strategy: Any, directory: Path) -> Tensor:
    model = TwoOptimizers()
    trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory).fit(model, train_loader(), val_loader())
    return model.weights()


def test_manual_optimization(tmp_path: Path) -> None:
    expected = launch(partial(fit_manually, "ddp_find_unused_parameters_true", tmp_path), 2, init=False)
    for weights in launch(partial(fit_manually, {**PIPE_SGD, "staleness": 0}, tmp_path), 2, init=False):
        assert torch.equal(weights, expected[0])
    delayed = launch(partial(fit_manually, PIPE_SGD, tmp_path), 2, init=False)
    assert torch.equal(delayed[0], delayed[1])
    assert not torch.equal(delayed[0], expected[0])
