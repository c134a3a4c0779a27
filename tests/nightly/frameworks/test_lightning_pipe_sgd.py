"""`Trainer(strategy="pipe_sgd")` on real processes against `strategy="ddp"` with a callback that delays gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.nightly.frameworks.test_lightning_dear import (
    DDP_UNUSED,
    TwoOptimizers,
    assert_same,
    fine_tune,
    fit_averaged,
    fit_manually,
)
from tests.references.pipe_sgd import simulate
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import (
    Classifier,
    dataset,
    fit,
    make_strategy,
    scaling,
    train_loader,
    trainer,
    val_loader,
)

PIPE_SGD = {"name": "pipe_sgd"}
#: As in the paper.
DELAYED = {**PIPE_SGD, "delay_compensation": "none"}
#: Settings, and arguments of the Trainer, with which it is compared with the simulation.
FOLLOWING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "k=2": ({"staleness": 2}, {"val_check_interval": 0.5}),
    "level 2": ({"pipeline_level": 2}, {"accumulate_grad_batches": 2, "val_check_interval": 3}),
}


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
    model, callback, within = ClippingByHand() if manual else Classifier(), Differing(), []
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


def fit_scaled(strategy: Any, directory: Path, scale: float) -> dict[str, Any]:
    plugin = scaling()
    assert plugin.scaler is not None
    plugin.scaler._init_scale = scale
    callbacks = [Delay(1)] if strategy == "ddp" else []
    result = fit(directory, strategy, {"optimizer": "sgd"}, plugins=[plugin], callbacks=callbacks)
    return {**result, "scale": plugin.scaler.get_scale()}


def run_on(
    strategy: Any, directory: Path, path: Path | None, steps: int, scaled: bool = False, world_size: int = 2
) -> dict[str, Any]:
    """Saves after every step."""
    model = Classifier(optimizer="adamw", batch_norm=True, scheduler=True)
    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    arguments: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": steps}
    if scaled:
        arguments["plugins"] = [scaling()]
    run = trainer(make_strategy(strategy), world_size, directory, log_every_n_steps=1, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    lost = [str(one.message).partition("The checkpoint is of 2 ranks, and there are 1: ")[2] for one in caught]
    updates = float(run.callback_metrics.get("pipe_sgd/updates", -1))
    return {"weights": model.weights(), "steps": run.global_step, "updates": updates, "lost": list(filter(None, lost))}


class ClippingByHand(TwoOptimizers):
    clip = 0.05


def fit_manually_scaled(directory: Path) -> tuple[Tensor, list[float]]:
    model, plugin = ClippingByHand(), scaling()
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


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    """What two ranks have trained, in this order: some resume from what others have saved."""
    clipped: dict[str, Any] = {"module": {"optimizer": "adamw"}, "gradient_clip_val": 0.1}
    cases: dict[Any, Any] = {
        **{case: partial(fit, folder, {**PIPE_SGD, **settings}, **how) for case, (settings, how) in FOLLOWING.items()},
        "drained": partial(fit, folder, {**DELAYED, "staleness": 3, "drain": True}, **clipped),
        "drained, ddp": partial(fit, folder, "ddp", callbacks=[Delay(3, drain=True)], **clipped),
        "compare": partial(fit_and_compare, False, folder),
        "compare, manual": partial(fit_and_compare, True, folder),
        "EMA, ddp": partial(fit_averaged, "ddp", folder, Delay(1)),
        "EMA": partial(fit_averaged, DELAYED, folder),
        "norms": partial(fit_and_look, {**PIPE_SGD, "staleness": 2}, folder),
        "norms, ddp": partial(fit_and_look, "ddp", folder),
        "scaled, ddp": partial(fit_scaled, "ddp", folder, 2.0**10),
        "scaled, delayed": partial(fit_scaled, DELAYED, folder, 2.0**10),
        "scaled": partial(fit_scaled, PIPE_SGD, folder, 2.0**10),
        "unscaled": partial(fit_scaled, PIPE_SGD, folder, 1),
        "overflow": partial(fit_scaled, PIPE_SGD, folder, 2.0**24),
        "whole": partial(run_on, PIPE_SGD, folder / "whole", None, 12, True),
        "resumed": partial(run_on, PIPE_SGD, folder / "resumed", folder / "whole" / "step=3.ckpt", 12, True),
        "saved": partial(run_on, PIPE_SGD, folder / "pipe_sgd", None, 8),
        "saved, ddp": partial(run_on, "ddp", folder / "ddp", None, 8),
        "to ddp": partial(run_on, "ddp", folder / "on", folder / "pipe_sgd" / "step=8.ckpt", 12),
        "from ddp": partial(run_on, PIPE_SGD, folder / "on", folder / "ddp" / "step=8.ckpt", 12),
        "clipping by hand": partial(fit_manually_scaled, folder),
        "manual, ddp": partial(fit_manually, DDP_UNUSED, folder, ClippingByHand),
        "manual, exact": partial(fit_manually, {**PIPE_SGD, "staleness": 0}, folder, ClippingByHand),
        "manual": partial(fit_manually, PIPE_SGD, folder, ClippingByHand),
    }
    for level in (0, 1, 2):
        strategy, also = ({**DELAYED, "pipeline_level": level}, []) if level else (DDP_UNUSED, [Delay(1)])
        cases["fine-tuned", level] = partial(fine_tune, strategy, folder / f"level {level}", *also)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("case", FOLLOWING)
def test_follows_algorithm_1(case: str, trained: Outcomes) -> None:
    """Bit for bit, whatever is validated in between."""
    outcomes, (settings, how) = trained[case], FOLLOWING[case]
    accumulate, classifier = how.get("accumulate_grad_batches", 1), Classifier()

    def loss(model: Classifier, batch: int, rank: int) -> Tensor:
        _, x, y = dataset()[outcomes[rank]["seen"][batch]]
        return nn.functional.cross_entropy(model.model(x), y) / accumulate

    simulate(
        classifier,
        classifier.configure_optimizers(),
        loss,
        world_size=2,
        num_steps=16 // accumulate,
        staleness=settings.get("staleness", 1),
        accumulate=accumulate,
        delay_compensation="prediction",
    )
    for outcome in outcomes:
        assert torch.equal(outcome["weights"], classifier.weights())


def test_a_drained_pipeline_is_ddp_delayed(trained: Outcomes) -> None:
    actual = trained["drained"]
    assert_same(actual, trained["drained, ddp"])
    metrics, steps = actual[0]["metrics"], actual[0]["steps"]
    assert metrics["pipe_sgd/updates"] == steps - 3
    assert metrics["pipe_sgd/staleness"] == 3
    assert metrics["pipe_sgd/mib_sent"] > 0


@pytest.mark.parametrize("case", ["compare", "compare, manual"])
def test_who_finds_predicted_weights(case: str, trained: Outcomes) -> None:
    """A forward pass of the training does. Callbacks find the same weights on all ranks, at any time."""
    for in_callbacks, in_forward in trained[case]:
        assert in_callbacks == 0
        assert in_forward > 10


def test_running_average_of_the_weights(trained: Outcomes) -> None:
    assert_same(trained["EMA"], trained["EMA, ddp"])


@pytest.mark.parametrize("level", [1, 2])
def test_fine_tuning(level: int, trained: Outcomes) -> None:
    for actual, expected in zip(trained["fine-tuned", level], trained["fine-tuned", 0], strict=True):
        assert torch.equal(actual["weights"], expected["weights"])
        assert all(map(torch.equal, actual["validated_with"], expected["validated_with"]))


def test_hooks_see_the_gradient_that_is_about_to_be_applied(trained: Outcomes) -> None:
    norms, rates = trained["norms"][0]
    assert trained["norms"][1] == (norms, rates)
    assert norms[:2] == [0.0, 0.0]
    assert all(norm > 0 for norm in norms[2:])
    assert rates == trained["norms, ddp"][0][1], "schedules count steps, as ever"


def test_loss_scaling(trained: Outcomes) -> None:
    assert_same(trained["scaled, delayed"], trained["scaled, ddp"], exact=False)
    assert_same(trained["scaled"], trained["unscaled"], exact=False)


def test_an_overflow_is_one_for_all(trained: Outcomes) -> None:
    """The scale overflows at first, and is the same on all ranks at the end."""
    actual = trained["overflow"]
    assert torch.equal(actual[0]["weights"], actual[1]["weights"])
    assert torch.isfinite(actual[0]["weights"]).all()
    assert actual[0]["scale"] == actual[1]["scale"] < 2.0**24
    assert 0 < actual[0]["metrics"]["pipe_sgd/updates"] < actual[0]["steps"] - 1


def test_a_resumed_run_with_a_loss_scaler_is_the_uninterrupted_one(trained: Outcomes, folder: Path) -> None:
    for one, other in zip(trained["resumed"], trained["whole"], strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["steps"] == other["steps"] == 12
        assert one["updates"] == other["updates"]
    assert torch.load(folder / "whole" / "step=3.ckpt", weights_only=True)["pipesync"]["world_size"] == 2


def test_checkpoints_interchange_with_ddp(trained: Outcomes, folder: Path) -> None:
    """Weights and optimizer; the pipeline fills anew."""
    assert len(trained["saved"]) == len(trained["saved, ddp"]) == 2
    path = folder / "pipe_sgd" / "step=8.ckpt"
    alone = launch_cases({"": partial(run_on, PIPE_SGD, folder / "alone", path, 12, world_size=1)}, 1, init=False)[""]
    dropped = ["gradients in flight are dropped, and the pipeline fills anew."]
    for outcomes, updates, lost in ((trained["to ddp"], -1, []), (trained["from ddp"], 3, []), (alone, 3, dropped)):
        for outcome in outcomes:
            assert outcome["steps"] == 12
            assert outcome["updates"] == updates
            assert outcome["lost"] == lost


def test_clipping_by_hand_knows_the_loss_scale(trained: Outcomes) -> None:
    outcomes = trained["clipping by hand"]
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1][0] == 2.0**10
    assert outcomes[0][1][-1] > 2.0**10


def test_manual_optimization(trained: Outcomes) -> None:
    expected, delayed = trained["manual, ddp"], trained["manual"]
    for weights in trained["manual, exact"]:
        assert torch.equal(weights, expected[0])
    assert torch.equal(delayed[0], delayed[1])
    assert not torch.equal(delayed[0], expected[0])
