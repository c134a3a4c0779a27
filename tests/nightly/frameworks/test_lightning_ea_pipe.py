"""EA-Pipe in a Trainer: metrics of rank 0 everywhere, what a mini-batch is, checkpoints, and what it cannot train."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipesync import EAPipeStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, launch, raised
from tests.support.lightning_models import (
    Classifier,
    Memory,
    dataset,
    fit,
    make_strategy,
    train_loader,
    trainer,
    val_loader,
)

PIPELINE = {"name": "ea_pipe", "split": (2,)}
ELASTIC = {**PIPELINE, "num_pipelines": 2, "algorithm": "1f1b", "average": "elastic", "average_period": 3}
MODULE = {"optimizer": "adamw", "batch_norm": True, "dropout": 0.3}


def loss_on(model: Classifier, indices: list[int]) -> Tensor:
    _, x, y = dataset()[torch.tensor(indices)]
    return nn.functional.cross_entropy(model.model(x), y)


class Augmented(TensorDataset):
    """Draws random numbers with torch, NumPy and Python."""

    def __getitem__(self, index: int) -> Any:
        i, x, y = super().__getitem__(index)
        return i, x + 0.01 * torch.randn_like(x) + 0.01 * float(np.random.rand()) + 0.01 * random.random(), y


class Watched(Classifier):
    """Has a head outside the pipeline and a metric, collects outputs, and draws random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        torch.manual_seed(4)
        self.head = nn.Linear(2, 2)
        self.accuracy = MulticlassAccuracy(2)
        self.computed: list[float] = []
        self.norms: list[list[bool]] = []
        self.outputs: list[Tensor] = []
        self.mixed: list[float] = []
        self.estimated = 0.0

    def _shared(self, batch: Any) -> tuple[Tensor, Tensor]:
        _, x, y = batch
        output = self.head(self.model(x + 0.01 * torch.randn_like(x)))
        return output, y

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        self.mixed.append(float(np.random.beta(1.0, 1.0)))  # as mixup draws
        output, y = self._shared(batch)
        self.accuracy(output, y)
        loss = (0.5 + self.mixed[-1]) * nn.functional.cross_entropy(output + 0.01 * torch.randn_like(output), y)
        self.log("acc", self.accuracy, on_epoch=True, on_step=False)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return {"loss": loss, "said": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        output, y = self._shared(batch)
        self.outputs.append(nn.functional.cross_entropy(output, y))
        self.log("val_loss", self.outputs[-1])

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:  # the other ranks have none
            self.log("collected", torch.stack(self.outputs).mean())
        self.outputs.clear()

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._shared(batch)[0]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append([p.grad is not None for p in self.parameters()])

    def on_train_epoch_end(self) -> None:
        self.computed.append(float(self.accuracy.compute()))
        self.log("epoch_acc", self.computed[-1])

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches  # which is before the method is there
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def watch(folder: Path) -> dict[str, Any]:
    """Trains, tests and predicts with everything that reads metrics."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(int(os.environ["RANK"]))  # the ranks begin with different states
    model = Watched()
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best")
    often = ModelCheckpoint(folder / "often", monitor="loss_step", every_n_train_steps=5, save_top_k=2)
    of_epoch = ModelCheckpoint(folder / "epoch", monitor="epoch_acc", mode="max", save_on_train_epoch_end=True)
    stopping = EarlyStopping("collected", patience=1, min_delta=10.0)
    run = trainer(
        make_strategy(PIPELINE),
        2,
        folder,
        callbacks=[best, often, of_epoch, stopping],
        enable_checkpointing=True,
        max_epochs=5,
        val_check_interval=0.5,
        precision="bf16-mixed",
        num_sanity_val_steps=1,
    )
    run.fit(model, DataLoader(Augmented(*dataset().tensors), batch_size=4, shuffle=True), val_loader())
    fitted = {name: float(value) for name, value in run.callback_metrics.items()}
    lr, best_epoch = run.optimizers[0].param_groups[0]["lr"], (of_epoch.best_model_path, of_epoch.best_model_score)
    [tested] = run.test(model, val_loader(), ckpt_path="best")
    shown = {name: float(value) for name, value in run.callback_metrics.items()}
    predictions = run.predict(model, val_loader())
    return {
        "fitted": fitted,
        "tested": shown,
        "returned": tested,
        "computed": model.computed,
        "mixed": model.mixed,
        "norms": model.norms,
        "best": (best.best_model_path, float(best.best_model_score)),
        "of_epoch": best_epoch,
        "often": sorted(Path(path).name for path in often.best_k_models),
        "steps": run.global_step,
        "estimated": model.estimated,
        "synchronized again": bool(model.accuracy.sync_on_compute and model.accuracy._to_sync),
        "lr": lr,
        "weights": model.weights(),
        "predictions": predictions,
    }


class Bad(Classifier):
    """A module that a pipeline cannot train, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "before":
            self.first = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, x, y = batch
        if self.kind == "before":
            x = self.first(x)
        output = self.model[2](self.model[1](self.model[0](x))) if self.kind == "layers" else self.model(x)
        if self.kind == "twice":
            output = output + self.model(x)
        loss = nn.functional.cross_entropy(output, y)
        if self.kind == "penalty":
            loss = loss + sum(p.square().sum() for p in self.parameters())
        return None if self.kind == "nothing" else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Overriding(Bad):
    """Overrides what a pipeline does itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.kind == "skips" and batch_idx % 2:
            optimizer_closure()
            return
        if self.kind == "again":
            optimizer.step(closure=lambda: (optimizer_closure(), optimizer_closure())[1])
            return
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.kind != "clips":
            super().configure_gradient_clipping(optimizer, *args, **kwargs)


#: What a step does that a pipeline cannot, and the words that name it.
WRONG = {
    "before": "depends on parameters outside",
    "layers": "without a call",
    "twice": "called 2 times",
    "penalty": "on another stage",
    "nothing": "must return a loss",
    "skips": "without a step of the optimizer",
    "again": "twice in a step",
    "clips": "has left it out",
}


def fit_wrongly(folder: Path, kind: str) -> tuple[str, str] | None:
    strategy = EAPipeStrategy(module="model", split=(2,), timeout_s=20)
    run = trainer(strategy, 2, folder, max_epochs=1, gradient_clip_val=0.5 if kind == "clips" else None)
    make = Overriding if kind in ("skips", "again", "clips") else Bad
    return raised(lambda: run.fit(make(kind), train_loader()))


class Unwritable(Memory):
    """Raises when rank 1 logs a text."""

    def log_text(self) -> None:
        if os.environ["RANK"] == "1":
            raise OSError("no space left")


class LogsAtEpochEnd(Classifier):
    """Logs at the end of an epoch, before a collective of its own."""

    def on_train_epoch_end(self) -> None:
        self.logger.log_text()  # type: ignore[union-attr]
        torch.distributed.all_reduce(torch.ones(1))


def log_wrongly(folder: Path) -> tuple[str, str] | None:
    strategy = EAPipeStrategy(module="model", split=(2,), timeout_s=20)
    run = trainer(strategy, 2, folder, max_epochs=1, logger=Unwritable())
    return raised(lambda: run.fit(LogsAtEpochEnd(), train_loader()))


def evaluate_only(folder: Path) -> list[Any]:
    model = Classifier()
    run = trainer("ea_pipe", 2, folder)
    run.validate(model, val_loader())
    validated = float(run.callback_metrics["val_loss"])
    run.test(model, val_loader())
    return [validated, float(run.callback_metrics["val_loss"]), run.predict(model, val_loader())]


def fit_elastic(folder: Path, max_epochs: int, resumes: bool = True) -> dict[str, Any]:
    """Saves a checkpoint after each epoch, or resumes from the first one's."""
    saving = [] if resumes else [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    return fit(
        folder, ELASTIC, MODULE, max_epochs=max_epochs, enable_checkpointing=not resumes, callbacks=saving,
        resume=folder / "epoch=0.ckpt" if resumes else None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        "saved": partial(fit, folder, PIPELINE, {"optimizer": "adamw"}, max_epochs=1, saved="saved.ckpt")
    }
    cases |= {how: partial(how, folder) for how in (watch, evaluate_only)}
    return launch_cases(cases, 2, init=False)


@pytest.fixture(scope="module")
def on_four(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {"whole": partial(fit_elastic, folder, 2, resumes=False)}
    return launch_cases(cases | {epochs: partial(fit_elastic, folder, epochs) for epochs in (1, 2)}, 4, init=False)


def test_all_ranks_find_the_metrics_of_rank_0(trained: Outcomes) -> None:
    """Early stopping, checkpoints of the best, schedulers on plateaus and metric objects behave as on one process."""
    first, second = trained[watch]
    for name in ("fitted", "tested", "computed", "mixed", "best", "of_epoch", "often", "steps", "estimated", "lr"):
        assert first[name] == second[name], name
    assert torch.equal(first["weights"], second["weights"])
    assert first["estimated"] == 5 * 16, "all ranks see all 64 samples"
    assert first["synchronized again"]
    assert second["synchronized again"]
    assert first["steps"] == 16  # stopped by the second validation
    assert set(first["fitted"]) >= {"acc", "loss", "loss_step", "loss_epoch", "val_loss"}
    assert first["computed"] == [pytest.approx(first["fitted"]["acc"])]
    assert len(first["often"]) == 2
    assert float(first["of_epoch"][1]) == pytest.approx(first["fitted"]["acc"])
    assert first["returned"] == {"val_loss": pytest.approx(first["tested"]["val_loss"])}
    # Rank 0 has the last stage: the last layer, and what comes after it.
    assert first["norms"] == [[False] * 2 + [True] * 6] * 16
    assert second["norms"] == [[True] * 2 + [False] * 6] * 16
    plain = Watched()
    plain.load_state_dict(torch.load(first["best"][0], weights_only=True)["state_dict"])
    plain.eval()
    assert second["predictions"] == [None] * 4
    with torch.no_grad():
        output = plain.head(plain.model(dataset()[:16][1]))
    torch.testing.assert_close(torch.cat(first["predictions"])[:16].float(), output, atol=0.1, rtol=0.1)


def saved_in(path: Path, **module: Any) -> Tensor:
    plain = Classifier(**module)
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    return plain.weights()


def test_pipelines_side_by_side(on_four: Outcomes, folder: Path) -> None:
    """They divide the samples, and resume bit for bit from what each had; all find the reference's weights."""
    whole, resumed = on_four["whole"], on_four[2]
    for epoch in (slice(0, 16), slice(16, 32)):  # of mini-batches in halves, which the last stages see
        indices = [index for rank in (0, 2) for batch in whole[rank]["seen"][epoch] for index in batch]
        assert sorted(indices) == list(range(len(dataset())))
    for epochs in (1, 2):
        for outcome in on_four[epochs]:  # of which the first one only loads
            assert torch.equal(outcome["weights"], saved_in(folder / f"epoch={epochs - 1}.ckpt", **MODULE))
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert all(one["metrics"][name] == other["metrics"][name] for name in ("loss", "val_loss"))
        assert other["seen"] == one["seen"][len(one["seen"]) - len(other["seen"]) :]


def test_checkpoints_load_in_plain_training_and_with_more_stages(trained: Outcomes, folder: Path) -> None:
    """The optimizer's state is included."""
    assert trained["saved"]
    checkpoint = torch.load(folder / "saved.ckpt", weights_only=True)
    optimizer: Any = Classifier(optimizer="adamw").configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert len(optimizer.state) == 6
    assert all(state["step"] == 8 for state in optimizer.state.values())  # of 16, every other one for each replica
    more = partial(fit, folder, {**PIPELINE, "split": (2, 4)}, {"optimizer": "adamw"}, resume=folder / "saved.ckpt")
    first, _, last = launch_cases({"": more}, 3, init=False)[""]
    assert torch.equal(first["weights"], last["weights"])
    assert not torch.equal(first["weights"], saved_in(folder / "saved.ckpt"))


@pytest.mark.parametrize("kind", WRONG)
def test_a_step_that_does_not_fit_is_named(kind: str, folder: Path) -> None:
    """On the rank that runs it; the other rank, which may be waiting, names its peer, or raises the same."""
    outcomes, words = launch(fit_wrongly, 2, folder, kind, init=False), WRONG[kind]
    assert all(outcome is not None for outcome in outcomes)
    assert any(words in outcome[1] for outcome in outcomes)
    for outcome in outcomes:
        assert outcome[0] == "RuntimeError"
        assert words in outcome[1] or "at fault" in outcome[1]


def test_a_rank_whose_epoch_end_fails_ends_the_training(folder: Path) -> None:
    """The other rank would wait in the hook's collective."""
    first, second = launch(log_wrongly, 2, folder, init=False)
    assert_raised(first, "RuntimeError", "Rank 1", "is at fault", "no space left")
    assert_raised(second, "RuntimeError", "on_train_epoch_end", "no space left", "is_global_zero")


def test_evaluation_without_training(trained: Outcomes) -> None:
    first, second = trained[evaluate_only]
    model = Classifier()
    with torch.no_grad():
        expected = pytest.approx(float(loss_on(model, list(range(64)))))
        output = model.model(dataset()[:][1])
    assert first[0] == first[1] == second[0] == second[1] == expected
    torch.testing.assert_close(torch.cat(first[2]), output)
