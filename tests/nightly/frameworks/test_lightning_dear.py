"""`Trainer(strategy="dear")` on real processes against `strategy="ddp"`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, dataset, fit, make_strategy, train_loader, trainer, val_loader

DEAR = {"name": "dear", "bucket_mb": 1e-4}
#: DDP that allows parameters without a gradient.
DDP_UNUSED = "ddp_find_unused_parameters_true"
ADAMW = {"optimizer": "adamw"}


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]], exact: bool = True) -> None:
    """The same weights on every rank, at every validation, and the same losses."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one["weights"], actual[0]["weights"])
        assert one["steps"] == other["steps"]
        assert one["seen"] == other["seen"]
        for weights, reference in zip(
            [*one["validated_with"], one["weights"]], [*other["validated_with"], other["weights"]], strict=True
        ):
            if exact:
                assert torch.equal(weights, reference), (weights - reference).abs().max()
            else:
                torch.testing.assert_close(weights, reference)
        assert one["metrics"]["val_loss"] == pytest.approx(other["metrics"]["val_loss"], abs=1e-6)


def fit_averaged(strategy: Any, directory: Path, *also: pl.Callback) -> dict[str, Any]:
    return fit(directory, strategy, ADAMW, callbacks=[EMAWeightAveraging(decay=0.5), *also])


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


def fine_tune(strategy: Any, directory: Path, *also: pl.Callback, path: Path | None = None) -> dict[str, Any]:
    """Three epochs, with a checkpoint at the end of each, or from one of them on."""
    model, saver = FineTuned(), ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    callbacks = [Thaw(), saver, *also] if isinstance(strategy, dict) else [Thaw(), saver, AverageGradients(), *also]
    run = trainer(make_strategy(strategy), 2, directory, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
    run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    return {"weights": model.weights(), "validated_with": model.validated_with}


def save(strategy: Any, directory: Path, steps: int) -> None:
    """Trains, and saves a checkpoint after so many steps."""
    saver = ModelCheckpoint(directory, filename=f"saved-{steps}", every_n_train_steps=steps)
    fit(directory, strategy, ADAMW, callbacks=[saver], enable_checkpointing=True, max_steps=steps)


def go_on(strategy: Any, directory: Path, path: Path | None, world_size: int = 2) -> dict[str, Any]:
    """Trains two epochs, and saves a checkpoint after the training."""
    model = Classifier(**ADAMW)
    run = trainer(make_strategy(strategy), world_size, directory)
    run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    run.save_checkpoint(directory / "after.ckpt")
    return {"weights": model.weights(), "steps": run.global_step}


class Random(Classifier):
    """With dropout, and a schedule for which the loaders are set up before a checkpoint's position is known."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw", dropout=0.2)

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Augmented(Dataset[Any]):
    """Draws a number for each sample that is fetched."""

    def __len__(self) -> int:
        return len(dataset())

    def __getitem__(self, index: int) -> Any:
        number, x, y = dataset()[index]
        return number, x + 0.1 * torch.randn(6), y


def train_randomly(strategy: Any, directory: Path, path: Path | None) -> tuple[Tensor, list[Any]]:
    """Two epochs; saves at the end of each, and within."""
    model = Random()
    savers = [ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)]
    savers.append(ModelCheckpoint(directory, filename="{step}", every_n_train_steps=3, save_top_k=-1))
    run = trainer(make_strategy(strategy), 2, directory, callbacks=savers, enable_checkpointing=True)
    run.fit(model, DataLoader(Augmented(), 4, shuffle=True), val_loader(), ckpt_path=path)
    return model.weights(), model.seen


class TwoOptimizers(Classifier):
    """As a GAN: manual optimization, one optimizer after the other; clips by hand if ``clip`` is set."""

    clip: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.model[0], self.model[2])]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        indices, x, y = batch
        self.seen.append(indices.tolist())
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.model(x), y))
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def fit_manually(strategy: Any, directory: Path, make: type[TwoOptimizers] = TwoOptimizers) -> Tensor:
    model = make()
    trainer(make_strategy(strategy), 2, directory).fit(model, train_loader(), val_loader())
    return model.weights()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    """What two ranks have trained, in this order: some resume from what others have saved."""
    scheduled: dict[str, Any] = {"optimizer": "adamw", "scheduler": True, "dropout": 0.2}
    saver = ModelCheckpoint(folder / "every", every_n_train_steps=1, save_top_k=-1)
    saving: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    cases: dict[Any, Any] = {"every step": partial(fit, folder, DEAR, {"batch_norm": True}, **saving)}
    for update in ("ddp", "sharded", "replicated"):
        strategy = update if update == "ddp" else {**DEAR, "update": update}
        cases["validation", update] = partial(fit, folder, strategy, scheduled, val_check_interval=0.5)
    for name, strategy, unused in (("dear", DEAR, DEAR), ("ddp", "ddp", DDP_UNUSED)):
        mine, tuned = folder / name, folder / "dear" / "epoch=1.ckpt"
        cases |= {
            ("tuned", name): partial(fine_tune, unused, mine),
            ("tuned further", name): partial(fine_tune, unused, mine / "further", path=tuned),
            ("saved", name): partial(save, strategy, mine, 5),
            ("buffers", name): partial(fit, folder, strategy, {"batch_norm": True}),
            ("manual", name): partial(fit_manually, unused, folder),
            ("whole", name): partial(go_on, strategy, mine, None),
        }
    for before, after in (("dear", "ddp"), ("ddp", "dear"), ("ddp", "ddp")):
        strategy = DEAR if after == "dear" else "ddp"
        cases[before, after] = partial(go_on, strategy, folder / "resumed", folder / before / "saved-5.ckpt")
    cases["epoch"] = partial(save, DEAR, folder, 8)
    for name in ("dear", "selsync"):
        train = partial(train_randomly, {"name": name})
        cases["random", name, 0] = partial(train, folder / f"random {name}", None)
        for steps in (3, 8):
            path = folder / f"random {name}" / ("step=3.ckpt" if steps == 3 else "epoch=0.ckpt")
            cases["random", name, steps] = partial(train, folder / "resumed", path)
    cases["tuned", "pipe_sgd"] = partial(fine_tune, {"name": "pipe_sgd", "staleness": 0}, folder / "tuned pipe_sgd")
    cases["tuned further", "pipe_sgd"] = partial(
        fine_tune, {"name": "pipe_sgd", "staleness": 0}, folder / "tuned pipe_sgd" / "further", path=tuned
    )
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_is_ddp_at_every_validation(update: str, trained: Outcomes) -> None:
    actual = trained["validation", update]
    assert_same(actual, trained["validation", "ddp"])
    assert actual[0]["metrics"]["dear/mib_sent"] > 0
    assert actual[0]["metrics"]["dear/buckets"] > 1


@pytest.mark.parametrize(("kind", "name"), [("tuned", "dear"), ("tuned further", "dear"), ("tuned", "pipe_sgd")])
def test_fine_tuning(kind: str, name: str, trained: Outcomes) -> None:
    """As with DDP; also resumed from the same checkpoint."""
    for actual, expected in zip(trained[kind, name], trained[kind, "ddp"], strict=True):
        assert torch.equal(actual["weights"], expected["weights"])
        assert all(map(torch.equal, actual["validated_with"], expected["validated_with"]))


@pytest.mark.parametrize("name", ["ddp", "dear"])
def test_checkpoints_hold_the_momenta_of_all_parameters(name: str, trained: Outcomes, folder: Path) -> None:
    assert trained["saved", name] == [None, None]
    checkpoint = torch.load(folder / name / "saved-5.ckpt", weights_only=True)
    assert len(checkpoint["optimizer_states"][0]["state"]) == 6


@pytest.mark.parametrize(
    ("actual", "expected"), [(("dear", "ddp"), ("ddp", "ddp")), (("ddp", "dear"), ("whole", "ddp"))]
)
def test_checkpoints_within_an_epoch(actual: tuple[str, str], expected: tuple[str, str], trained: Outcomes) -> None:
    """There DDP begins the epoch anew, and DeAR goes on with the next batch."""
    for one, other in zip(trained[actual], trained[expected], strict=True):
        assert one["steps"] == other["steps"] == 16
        assert torch.equal(one["weights"], other["weights"])


@pytest.mark.parametrize("steps", [3, 8])
@pytest.mark.parametrize("name", ["dear", "selsync"])
def test_random_numbers_go_on(name: str, steps: int, trained: Outcomes) -> None:
    """In mid-epoch, and at the end of one, after its validation."""
    for whole, resumed in zip(trained["random", name, 0], trained["random", name, steps], strict=True):
        assert resumed[1] == whole[1][steps:]
        assert torch.equal(resumed[0], whole[0])


def test_another_number_of_ranks(trained: Outcomes, folder: Path) -> None:
    assert trained["epoch"] == [None, None]
    path = folder / "saved-8.ckpt"
    runs = {
        name: partial(go_on, strategy, folder / "alone", path, 1) for name, strategy in (("ddp", "ddp"), ("dear", DEAR))
    }
    alone = launch_cases(runs, 1, init=False)
    [expected], [one] = alone["ddp"], alone["dear"]
    assert one["steps"] == expected["steps"] > 8
    assert torch.equal(one["weights"], expected["weights"])


def test_buffers_are_those_of_the_first_rank(trained: Outcomes) -> None:
    """DDP sends them before each forward pass; here it is done whenever the weights are read."""
    actual = trained["buffers", "dear"]
    assert torch.equal(actual[0]["weights"], trained["buffers", "ddp"][0]["weights"])
    assert torch.equal(actual[1]["weights"], actual[0]["weights"])


def test_manual_optimization(trained: Outcomes) -> None:
    for weights in trained["manual", "dear"]:
        assert torch.equal(weights, trained["manual", "ddp"][0])


def test_a_checkpoint_after_the_training_is_whole(trained: Outcomes, folder: Path) -> None:
    assert torch.equal(trained["whole", "dear"][0]["weights"], trained["whole", "ddp"][0]["weights"])
    expected, actual = (torch.load(folder / name / "after.ckpt", weights_only=True) for name in ("ddp", "dear"))
    for key, value in expected["state_dict"].items():
        assert torch.equal(actual["state_dict"][key], value)
    [kept], [saved] = expected["optimizer_states"], actual["optimizer_states"]
    assert saved["state"].keys() == kept["state"].keys()
    for index, of_parameter in kept["state"].items():
        assert all(torch.equal(saved["state"][index][name], value) for name, value in of_parameter.items())


def test_buffers_and_checkpoints_in_mid_epoch(trained: Outcomes, folder: Path) -> None:
    """Saving after every step, with buffers to send, whether or not this rank's weights have arrived."""
    outcomes = trained["every step"]
    assert torch.equal(outcomes[0]["weights"], outcomes[1]["weights"])
    assert len(list((folder / "every").glob("*.ckpt"))) == 16
