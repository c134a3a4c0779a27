"""`Trainer(strategy="dear")` on real processes against `strategy="ddp"`."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.harness import launch
from tests.lightning_models import (
    Classifier,
    dataset,
    fit,
    fit_on,
    make_strategy,
    train_loader,
    trainer,
    val_loader,
)

DEAR = {"name": "dear", "bucket_mb": 1e-4}


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


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_is_ddp_at_every_validation(update: str, tmp_path: Path) -> None:
    module, arguments = {"optimizer": "adamw", "scheduler": True, "dropout": 0.2}, {"val_check_interval": 0.5}
    actual = fit_on(2, tmp_path, {**DEAR, "update": update}, module, **arguments)
    assert_same(actual, fit_on(2, tmp_path, "ddp", module, **arguments))
    assert actual[0]["metrics"]["dear/mib_sent"] > 0
    assert actual[0]["metrics"]["dear/buckets"] > 1


def test_by_its_name(tmp_path: Path) -> None:
    assert_same(fit_on(3, tmp_path, "dear"), fit_on(3, tmp_path, "ddp"), exact=False)


def fit_averaged(strategy: Any, directory: Path, *also: pl.Callback) -> dict[str, Any]:
    return fit(directory, strategy, {"optimizer": "adamw"}, callbacks=[EMAWeightAveraging(decay=0.5), *also])


def test_running_average_of_the_weights(tmp_path: Path) -> None:
    expected = launch(partial(fit_averaged, "ddp", tmp_path), 2, init=False)
    assert_same(launch(partial(fit_averaged, DEAR, tmp_path), 2, init=False), expected)


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


def fine_tune(strategy: Any, directory: Path, *also: pl.Callback) -> tuple[Tensor, list[Tensor]]:
    model = FineTuned()
    callbacks = [Thaw(), *also] if isinstance(strategy, dict) else [Thaw(), AverageGradients(), *also]
    run = trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory, callbacks=callbacks, max_epochs=3)
    run.fit(model, train_loader(), val_loader())
    return model.weights(), model.validated_with


def test_fine_tuning(tmp_path: Path) -> None:
    expected = launch(partial(fine_tune, "ddp_find_unused_parameters_true", tmp_path), 2, init=False)
    for actual, reference in zip(launch(partial(fine_tune, DEAR, tmp_path), 2, init=False), expected, strict=True):
        assert torch.equal(actual[0], reference[0])
        assert all(torch.equal(a, b) for a, b in zip(actual[1], reference[1], strict=True))


def save(strategy: Any, world_size: int, directory: Path, steps: int) -> Path:
    """Trains, and saves a checkpoint after so many steps."""
    saver = ModelCheckpoint(directory, filename="saved", every_n_train_steps=steps, save_top_k=1, monitor=None)
    arguments = {"callbacks": [saver], "enable_checkpointing": True, "max_steps": steps}
    fit_on(world_size, directory, strategy, {"optimizer": "adamw"}, **arguments)
    path = directory / "saved.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert len(checkpoint["optimizer_states"][0]["state"]) == 6, "momenta of all parameters"
    return path


def go_on(strategy: Any, directory: Path, path: Path | None) -> dict[str, Any]:
    model = Classifier(optimizer="adamw")
    run = trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory)
    run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    return {"weights": model.weights(), "steps": run.global_step}


@cache
def whole_with_ddp() -> list[dict[str, Any]]:
    with TemporaryDirectory() as directory:
        return launch(partial(go_on, "ddp", Path(directory), None), 2, init=False)


@pytest.mark.parametrize(("first", "second"), [(DEAR, "ddp"), ("ddp", DEAR)], ids=["to", "from"])
def test_checkpoints_within_an_epoch(first: Any, second: Any, tmp_path: Path) -> None:
    """There DDP begins the epoch anew, and DeAR goes on with the next batch."""
    steps = 5
    if second == "ddp":
        reference = save("ddp", 2, tmp_path / "reference", steps)
        expected = launch(partial(go_on, "ddp", tmp_path, reference), 2, init=False)
    else:
        expected = whole_with_ddp()
    path = save(first, 2, tmp_path / "saved", steps)
    for one, other in zip(launch(partial(go_on, second, tmp_path, path), 2, init=False), expected, strict=True):
        assert one["steps"] == other["steps"] == 16
        assert torch.equal(one["weights"], other["weights"])


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


@pytest.mark.parametrize("name", ["dear", "selsync"])
def test_random_numbers_go_on(name: str, tmp_path: Path) -> None:
    """In mid-epoch, and at the end of one, after its validation."""
    whole = launch(train_randomly, 2, {"name": name}, tmp_path, None, init=False)
    for saved, steps in (("step=3", 3), ("epoch=0", 8)):
        path = tmp_path / f"{saved}.ckpt"
        resumed = launch(train_randomly, 2, {"name": name}, tmp_path / "resumed", path, init=False)
        for (weights, seen), (expected, all_seen) in zip(resumed, whole, strict=True):
            assert seen == all_seen[steps:]
            assert torch.equal(weights, expected), saved


def test_another_number_of_ranks(tmp_path: Path) -> None:
    path = save(DEAR, 2, tmp_path, 8)
    [expected] = launch(partial(go_on, "ddp", tmp_path, path), 1, init=False)
    [one] = launch(partial(go_on, DEAR, tmp_path, path), 1, init=False)
    assert one["steps"] == expected["steps"] > 8
    assert torch.equal(one["weights"], expected["weights"])


def fit_in_parallel(strategy: Any, directory: Path) -> dict[str, Any]:
    return fit(directory, strategy, {"optimizer": "sgd", "batch_norm": True})


def test_buffers_are_those_of_the_first_rank(tmp_path: Path) -> None:
    """DDP sends them before each forward pass; here it is done whenever the weights are read."""
    expected = launch(partial(fit_in_parallel, "ddp", tmp_path), 2, init=False)
    actual = launch(partial(fit_in_parallel, DEAR, tmp_path), 2, init=False)
    assert torch.equal(actual[0]["weights"], expected[0]["weights"])
    assert torch.equal(actual[1]["weights"], actual[0]["weights"])


class TwoOptimizers(Classifier):
    """As a GAN: manual optimization, one optimizer after the other."""

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
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def fit_manually(strategy: Any, directory: Path) -> Tensor:
    model = TwoOptimizers()
    trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory).fit(model, train_loader(), val_loader())
    return model.weights()


def test_manual_optimization(tmp_path: Path) -> None:
    expected = launch(partial(fit_manually, "ddp_find_unused_parameters_true", tmp_path), 2, init=False)
    for weights in launch(partial(fit_manually, DEAR, tmp_path), 2, init=False):
        assert torch.equal(weights, expected[0])


def save_after_training(strategy: Any, directory: Path) -> None:
    model = Classifier(optimizer="adamw")
    run = trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory)
    run.fit(model, train_loader(), val_loader())
    run.save_checkpoint(directory / "after.ckpt")


def test_a_checkpoint_after_the_training_is_whole(tmp_path: Path) -> None:
    for name, strategy in (("ddp", "ddp"), ("dear", DEAR)):
        launch(partial(save_after_training, strategy, tmp_path / name), 2, init=False)
    expected, actual = (torch.load(tmp_path / name / "after.ckpt", weights_only=True) for name in ("ddp", "dear"))
    for key, value in expected["state_dict"].items():
        assert torch.equal(actual["state_dict"][key], value)
    [kept], [saved] = expected["optimizer_states"], actual["optimizer_states"]
    assert saved["state"].keys() == kept["state"].keys()
    for index, of_parameter in kept["state"].items():
        assert all(torch.equal(saved["state"][index][name], value) for name, value in of_parameter.items())


def test_buffers_and_checkpoints_in_mid_epoch(tmp_path: Path) -> None:
    """Saving after every step, with buffers to send, whether or not this rank's weights have arrived."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    arguments = {"callbacks": [saver], "enable_checkpointing": True}
    outcomes = fit_on(2, tmp_path, DEAR, {"batch_norm": True}, **arguments)
    assert torch.equal(outcomes[0]["weights"], outcomes[1]["weights"])
    assert len(list(tmp_path.glob("*.ckpt"))) == 16


def fine_tune_on(strategy: Any, directory: Path, path: Path | None) -> Tensor:
    """To the end of the second epoch of three, or from there on."""
    model, saver = FineTuned(), ModelCheckpoint(directory, filename="tuned-{epoch}", save_top_k=-1)
    callbacks = [Thaw(), saver] if isinstance(strategy, dict) else [Thaw(), saver, AverageGradients()]
    epochs = 2 if path is None else 3
    arguments = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": epochs}
    run = trainer(make_strategy(strategy), int(os.environ["WORLD_SIZE"]), directory, **arguments)
    run.fit(model, train_loader(), val_loader(), ckpt_path=path)
    return model.weights()


def test_fine_tuning_can_be_resumed(tmp_path: Path) -> None:
    """As with DDP, from the same checkpoint."""
    launch(partial(fine_tune_on, DEAR, tmp_path, None), 2, init=False)
    path = tmp_path / "tuned-epoch=1.ckpt"
    expected = launch(partial(fine_tune_on, "ddp_find_unused_parameters_true", tmp_path / "ddp", path), 2, init=False)
    for weights in launch(partial(fine_tune_on, DEAR, tmp_path / "dear", path), 2, init=False):
        assert torch.equal(weights, expected[0])
