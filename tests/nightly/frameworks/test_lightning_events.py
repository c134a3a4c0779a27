"""What happens in a Trainer beside plain steps: with settings that are DDP's, all of it is as with DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from tqdm import tqdm

from tests.references.selsync import mean
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import (
    LOCAL,
    Classifier,
    dataset,
    fit,
    make_strategy,
    train_loader,
    trainer,
    val_loader,
)
from tests.support.models import assert_same

#: Methods, and settings, with which the weights are DDP's.
EXACT: dict[str, dict[str, Any]] = {
    "dear": {"name": "dear", "bucket_mb": 1e-4},
    "pipe_sgd": {"name": "pipe_sgd", "staleness": 0},
    "local_sgd": {"name": "local_sgd", "warmup_steps": 1000},
    "selsync": {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"},
    "parameter_server": {"name": "parameter_server", "policy": "sync"},
}
#: DDP that allows parameters without a gradient.
DDP_UNUSED = "ddp_find_unused_parameters_true"


class SavesInStep(Classifier):
    """Saves a checkpoint in the midst of a step, and records the weights that training goes on from."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.checkpoint_callbacks and batch_idx in (2, 3):
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"within {batch_idx}.ckpt")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.validated_with.append(nn.utils.parameters_to_vector(self.parameters()).detach().clone())


class TwoGroups(Classifier):
    """Two parameter groups with settings of their own, and a schedule."""

    def configure_optimizers(self) -> Any:
        weights, biases = ([p for p in self.parameters() if (p.dim() > 1) == which] for which in (True, False))
        groups = [{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Thaw(BaseFinetuning):
    """The first layer joins in the second epoch, in a group of its own."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.model[0][0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0][0], optimizer, lr=0.02)


class FineTuned(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)


class AverageGradients(pl.Callback):
    """DDP does not know parameters that were frozen when it was made. To average the others again changes nothing."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2


class TwoOptimizers(Classifier):
    """As a GAN: manual optimization, one optimizer after the other; clips by hand if ``clip`` is set."""

    clip: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.model[0], self.model[2])]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class Fetching(Classifier):
    """It takes its batches from the loader itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        (indices, x, y), _, _ = next(dataloader_iter)
        self.seen.append(indices.tolist())
        return nn.functional.cross_entropy(self.model(x), y)


@dataclass(frozen=True)
class Event:
    """A training in which something happens; ``callbacks`` and ``of_ddp``, which DDP has besides, make new ones."""

    make: type[Classifier] = Classifier
    module: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    of_ddp: tuple[Callable[[], pl.Callback], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    ddp: str = "ddp"
    saves: bool = False
    methods: tuple[str, ...] = tuple(EXACT)


EVENTS = {
    "validation": Event(TwoGroups, arguments={"val_check_interval": 0.5}, saves=True),
    "saving at and in steps": Event(SavesInStep, {"batch_norm": True}),
    "thawing": Event(
        FineTuned,
        callbacks=(Thaw,),
        of_ddp=(AverageGradients,),
        arguments={"max_epochs": 3},
        ddp=DDP_UNUSED,
        methods=("dear", "pipe_sgd"),  # others average the weights of parameters that are added, or refuse them
    ),
    "manual optimization": Event(TwoOptimizers, ddp=DDP_UNUSED),
    "a step that takes the iterator": Event(Fetching),
    "EMA": Event(module={"batch_norm": True}, callbacks=(partial(EMAWeightAveraging, decay=0.8),)),
}
HAPPENING = [(name, method) for name, event in EVENTS.items() for method in event.methods]
#: Where a resumed training thaws, too.
RESUMED = ("dear", "pipe_sgd")


def happen(folder: Path, name: str, method: str) -> dict[str, Any]:
    event, callbacks = EVENTS[name], []
    own = folder / f"{name} {method}"
    if name == "saving at and in steps" and method != "ddp":
        callbacks = [ModelCheckpoint(own, every_n_train_steps=1, save_top_k=-1)]
    elif name == "thawing":
        callbacks = [ModelCheckpoint(own, "{epoch}", save_top_k=-1)]
    return train(event, own, method, callbacks)


def train(
    event: Event, folder: Path, method: str, callbacks: list[pl.Callback], resume: Path | None = None
) -> dict[str, Any]:
    making = [*event.callbacks, *(event.of_ddp if method == "ddp" else ())]
    return fit(
        folder, event.ddp if method == "ddp" else EXACT[method], event.module, make=event.make, resume=resume,
        saved="after.ckpt" if event.saves else None, callbacks=[*callbacks, *(make() for make in making)],
        enable_checkpointing=bool(callbacks), **event.arguments,
    )  # fmt: skip


def go_on_thawing(folder: Path, method: str) -> dict[str, Any]:
    return train(EVENTS["thawing"], folder / "on", method, [], folder / "thawing dear" / "epoch=1.ckpt")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    by_ddp = [(name, "ddp") for name in EVENTS]
    cases: dict[Any, Any] = {case: partial(happen, folder, *case) for case in [*by_ddp, *HAPPENING]}
    cases |= {("on", method): partial(go_on_thawing, folder, method) for method in ("ddp", *RESUMED)}
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize(("name", "method"), HAPPENING)
def test_it_is_as_with_ddp(name: str, method: str, trained: Outcomes, folder: Path) -> None:
    """Bit for bit, but for running averages, also at every validation; the buffers of all ranks are those of rank 0.

    Where replicas are averaged, so are they, as DDP does not do.
    """
    outcomes, expected = trained[name, method], trained[name, "ddp"]
    for actual, other in zip(outcomes, expected, strict=True):
        assert (actual["seen"], actual["steps"]) == (other["seen"], other["steps"])
        found, by_ddp = ([one["weights"], *one["validated_with"]] for one in (actual, expected[0]))
        if method in ("local_sgd", "selsync") and EVENTS[name].module.get("batch_norm"):
            found, by_ddp = [actual["parameters"]], [expected[0]["parameters"]]
        for one, reference in zip(found, by_ddp, strict=True):
            torch.testing.assert_close(one, reference, **({} if name == "EMA" else {"rtol": 0, "atol": 0}))
        assert torch.equal(actual["weights"], outcomes[0]["weights"])
        assert f"{method}/mib_sent" in actual["metrics"]
    if name == "saving at and in steps":
        assert len(list((folder / f"{name} {method}").rglob("*.ckpt"))) == 16 + 2


@pytest.mark.parametrize("method", RESUMED)
def test_thawing_goes_on_where_a_checkpoint_was_saved(method: str, trained: Outcomes) -> None:
    for actual, expected in zip(trained["on", method], trained["on", "ddp"], strict=True):
        assert torch.equal(actual["weights"], expected["weights"])
        assert all(map(torch.equal, actual["validated_with"], expected["validated_with"]))


@pytest.mark.parametrize("method", EXACT)
def test_a_checkpoint_after_the_training_is_whole(method: str, trained: Outcomes, folder: Path) -> None:
    assert trained["validation", method]
    expected, actual = (
        torch.load(folder / f"validation {name}" / "after.ckpt", weights_only=True) for name in ("ddp", method)
    )
    assert_same(actual["state_dict"], expected["state_dict"])
    [kept], [saved] = expected["optimizer_states"], actual["optimizer_states"]
    assert saved["state"].keys() == kept["state"].keys()
    for index, of_parameter in kept["state"].items():
        assert_same(saved["state"][index], of_parameter)


# --- with settings that are not DDP's ---------------------------------------------------------------------------------


def look(folder: Path, strategy: Any, **how: Any) -> dict[str, Any]:
    """Fits, and then validates, tests and predicts."""
    watch, model = Watch(), Classifier()
    run = trainer(make_strategy(strategy), 2, folder, callbacks=[watch], **how)
    run.fit(model, train_loader(), val_loader())
    return {
        "each": watch.steps,
        "found": [*watch.ends, *model.validated_with, model.weights()],
        "validated": run.validate(model, val_loader(), verbose=False),
        "tested": run.test(model, val_loader(), verbose=False),
        "predicted": torch.cat(run.predict(model, val_loader())),
    }


class Watch(pl.Callback):
    """Keeps the weights that a callback finds at each step and at the ends."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.ends: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Classifier, *args: Any) -> None:
        self.steps.append(pl_module.weights())

    def on_train_end(self, trainer: Any, pl_module: Classifier) -> None:
        self.ends.append(pl_module.weights())

    def on_train_epoch_end(self, trainer: Any, pl_module: Classifier) -> None:
        self.ends.append(pl_module.weights())


#: Local steps without validation, and steps of both kinds with it.
LOOKED_AT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "callbacks": (LOCAL, {"limit_val_batches": 0}),
    "validation": ({"delta": 0.1, "smoothing": 0.3}, {}),
}


class Tuned(Classifier):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


#: The method, and what finds its learning rate.
TUNED = [({"delta": 0.1}, "tuner"), ({"delta": 0.1}, "callback"), ({"name": "local_sgd", "period": 5}, "tuner")]


def tune(folder: Path, settings: dict[str, Any], how: str) -> list[tuple[float, Tensor, dict[str, Tensor]]]:
    """Returns what a finder has led to, which puts callbacks in place of the Trainer's, and a run with its result."""
    search: dict[str, Any] = {"min_lr": 1e-4, "early_stop_threshold": None}
    found: list[tuple[float, Tensor, dict[str, Tensor]]] = []
    for now, lr in ((how, 0.5), ("plain", None)):
        model = Tuned(found[0][0] if lr is None else lr)
        callbacks = [LearningRateFinder(num_training_steps=14, **search)] if now == "callback" else []
        # A Trainer removes what a launcher has set, and its progress bar may start a thread that stays.
        with mock.patch.dict(os.environ), mock.patch.object(tqdm, "monitor_interval", 0):
            run = trainer(make_strategy(settings), 2, folder, callbacks=callbacks)
            if now == "tuner":
                Tuner(run).lr_find(model, train_loader(), num_training=14, **search)
            run.fit(model, train_loader())
        metrics = {name: value for name, value in run.callback_metrics.items() if name.endswith("/lssr")}
        found.append((model.lr, model.weights(), metrics))
    return found


@pytest.fixture(scope="module")
def others(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {name: partial(look, folder, given, **how) for name, (given, how) in LOOKED_AT.items()}
    cases |= {("tuned", index): partial(tune, folder, *case) for index, case in enumerate(TUNED)}
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("name", LOOKED_AT)
def test_whoever_looks_finds_the_average(name: str, others: Outcomes) -> None:
    """Bit for bit, at the end of epochs and of the fit, and validating; each rank trains on from its own replica."""
    outcomes = others[name]
    averages = [mean(list(step)) for step in zip(*(outcome["each"] for outcome in outcomes), strict=True)]
    model = Classifier()
    nn.utils.vector_to_parameters(averages[15], model.parameters())
    _, x, y = dataset().tensors
    with torch.no_grad():
        logits = model.model(x)
    loss = pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
    validations = [] if name == "callbacks" else [averages[7], averages[15]]
    for rank, outcome in enumerate(outcomes):
        expected = [averages[7], averages[15], averages[15], *validations, averages[15]]
        assert all(torch.equal(one, other) for one, other in zip(outcome["found"], expected, strict=True))
        assert not all(torch.equal(own, average) for own, average in zip(outcome["each"], averages, strict=True))
        if name != "callbacks":
            assert outcome["validated"] == outcome["tested"] == [{"val_loss": loss}]
        torch.testing.assert_close(outcome["predicted"], logits[rank::2])


@pytest.mark.parametrize("index", range(len(TUNED)))
def test_the_search_for_a_learning_rate_leaves_no_trace(index: int, others: Outcomes) -> None:
    """What follows is a run with the learning rate that was found, on all ranks the same."""
    (first, _), _ = outcomes = others["tuned", index]
    for found, expected in outcomes:
        assert found[0] == expected[0] == first[0] != 0.5
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[1], first[1])
        assert found[2] == expected[2] != {}
