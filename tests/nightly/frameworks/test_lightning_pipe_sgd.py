"""Pipe-SGD in a Trainer: who sees which weights and gradients, and what becomes of the last gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_pipesync import PipeSGD
from tests.nightly.frameworks.test_lightning_events import FineTuned, Thaw, TwoOptimizers
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, dataset, fit, make_strategy, train_loader, trainer, val_loader

PIPE_SGD = {"name": "pipe_sgd"}
CLIP = 0.1


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

    on_train_batch_end = on_validation_batch_start = on_train_batch_start


class ClippingByHand(TwoOptimizers):
    clip = 0.05


class NormSeen(Classifier):
    """Records the norm of the gradient before each update and the learning rate at the end of each epoch."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.validated_with.append(torch.stack([gradient.norm() for gradient in gradients]).norm())

    def on_train_epoch_end(self) -> None:
        self.validated_with.append(torch.tensor(self.optimizers().param_groups[0]["lr"]))


def fit_and_compare(make: type[Classifier], folder: Path) -> tuple[int, int]:
    """Returns how often callbacks found other weights on the other rank, and how often a training step did."""
    model, callback, within = make(), Differing(), Differing()
    forward = model.model[0].forward

    def look(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            within.look(run, [model.model[0][0].weight])
        return forward(x)

    model.model[0].forward = look
    run = trainer(make_strategy(PIPE_SGD), 2, folder, callbacks=[callback], val_check_interval=0.5)
    run.fit(model, train_loader(), val_loader())
    return callback.differing, within.differing


def drain(folder: Path) -> tuple[dict[str, Any], Tensor]:
    """Returns what comes of a fit, and the weights of a plain loop on the same batches."""
    settings: dict[str, Any] = {"staleness": 3, "delay_compensation": "none"}
    outcome = fit(folder, {**PIPE_SGD, **settings, "drain": True}, gradient_clip_val=CLIP)
    model = Classifier()
    optimizer = model.configure_optimizers()
    sync = PipeSGD(model, optimizer, **settings)
    for indices in outcome["seen"]:
        _, x, y = dataset()[indices]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.model(x), y).backward()
        sync.clip(CLIP)
        sync.step()
    sync.drain(lambda _: nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    sync.detach()
    return outcome, model.weights()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    run = partial(fit, folder)
    norms = partial(run, make=NormSeen, module={"scheduler": True}, limit_val_batches=0)
    cases: dict[Any, Any] = {
        "compare": partial(fit_and_compare, Classifier, folder),
        "compare, manual": partial(fit_and_compare, ClippingByHand, folder),
        "norms": partial(norms, {**PIPE_SGD, "staleness": 2}),
        "norms, ddp": partial(norms, "ddp"),
        "drained": partial(drain, folder),
    }
    for level in (1, 2):
        strategy = {**PIPE_SGD, "delay_compensation": "none", "pipeline_level": level}
        cases["thawing", level] = partial(run, strategy, make=FineTuned, max_epochs=3, callbacks=[Thaw()])
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("case", ["compare", "compare, manual"])
def test_who_finds_predicted_weights(case: str, trained: Outcomes) -> None:
    """A forward pass of the training does. Callbacks find the same weights on all ranks, at any time."""
    for in_callbacks, in_forward in trained[case]:
        assert in_callbacks == 0
        assert in_forward > 10


def test_hooks_see_the_gradient_that_is_about_to_be_applied(trained: Outcomes) -> None:
    """The same on all ranks; schedules count steps, as ever."""
    (first, second), expected = trained["norms"], trained["norms, ddp"][0]["validated_with"]
    norms = first["validated_with"]
    assert all(map(torch.equal, norms, second["validated_with"]))
    assert norms[0] == norms[1] == 0
    assert all(norm > 0 for norm in norms[2:])
    assert [norms[index] for index in (8, 17)] == [expected[index] for index in (8, 17)], "the learning rates"


def test_the_last_gradients_are_applied_on_demand(trained: Outcomes) -> None:
    for outcome, weights in trained["drained"]:
        assert torch.equal(outcome["weights"], weights)
        assert outcome["metrics"]["pipe_sgd/updates"] == outcome["steps"] - 3
        assert outcome["metrics"]["pipe_sgd/staleness"] == 3


def test_parameters_may_join_while_gradients_are_in_flight(trained: Outcomes) -> None:
    """Whether whole gradients are in flight, or segments that are sent within the backward pass."""
    for one, other in zip(trained["thawing", 1], trained["thawing", 2], strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert torch.equal(one["weights"], trained["thawing", 1][0]["weights"])
        assert all(map(torch.equal, one["validated_with"], other["validated_with"]))
