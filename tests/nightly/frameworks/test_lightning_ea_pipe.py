"""EA-Pipe in the Trainer, against the engine on the same batches."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipesync import EAPipe, EAPipeStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.ea_pipe_runs import ASYNCHRONOUS, average_elastically
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import (
    Classifier,
    Fetching,
    dataset,
    fit,
    make_strategy,
    scaling,
    train_loader,
    trainer,
    val_loader,
)
from tests.support.models import OPTIMIZERS

SPLIT = {2: (2,), 3: (2, 4)}


def engine_on(seen: list[list[int]], algorithm: str) -> Any:
    """The weights of a Classifier that virtual stages have trained on the same batches, and the losses."""
    model = Classifier(**MODULE)
    make = OPTIMIZERS[model.optimizer_name]

    class Holder(nn.Module):
        def __init__(self, parameters: Any) -> None:
            super().__init__()
            self.held = nn.ParameterList(parameters)

    engine = EAPipe(
        model.model,
        nn.functional.cross_entropy,
        lambda parameters: make(Holder(parameters)),
        virtual_stages=2,
        split=SPLIT[2],
        algorithm=algorithm,
    )
    losses = []
    for indices in seen:
        _, x, y = dataset()[torch.tensor(indices)]
        losses.append(engine.train_batch((x, y)))
    engine.flush()
    return model.weights(), losses


def split_on(num_stages: int = 2, **settings: Any) -> dict[str, Any]:
    return {"name": "ea_pipe", "split": SPLIT[num_stages], **settings}


SYNCHRONOUS = ("gpipe", "1f1b")
COLLECTED = ("ea_pipe", "gpipe")
MODULE = {"optimizer": "adamw", "dropout": 0.3, "batch_norm": True}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        algorithm: partial(fit, folder, split_on(algorithm=algorithm), max_epochs=1, **options)
        for algorithms, options in ((ASYNCHRONOUS, {"module": MODULE}), (SYNCHRONOUS, {"gradient_clip_val": 0.5}))
        for algorithm in algorithms
    }
    accumulated = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
    cases["accumulated"] = partial(fit, folder, split_on(), {"scheduler": True}, max_epochs=3, **accumulated)
    cases |= {("collected", algorithm): partial(collect, folder, algorithm) for algorithm in COLLECTED}
    cases |= {how: partial(how, folder) for how in (watch, evaluate_only, fit_badly)}
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_trainer_is_the_engine(algorithm: str, trained: Outcomes) -> None:
    """Bit for bit, dropout included; every rank has all weights, and the metrics of rank 0."""
    outcomes = trained[algorithm]
    weights, losses = engine_on(outcomes[0]["seen"], algorithm)
    for outcome in outcomes:
        assert torch.equal(outcome["weights"], weights)
        assert outcome["steps"] == 16
        assert outcome["metrics"] == outcomes[0]["metrics"]
    assert outcomes[0]["metrics"]["loss"] == pytest.approx(float(losses[-1]))


@pytest.mark.parametrize("algorithm", SYNCHRONOUS)
def test_synchronous_pipelines_are_plain_training(algorithm: str, trained: Outcomes) -> None:
    outcomes = trained[algorithm]
    model = Classifier()
    optimizer = OPTIMIZERS["sgd"](model)
    for indices in outcomes[0]["seen"][::2]:  # the batches; each micro-batch of them was seen, too
        assert len(indices) == 2
    seen = outcomes[0]["seen"]
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        _, x, y = dataset()[torch.tensor(first + second)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for outcome in outcomes:
        torch.testing.assert_close(outcome["weights"], model.weights())


def test_accumulated_batches_are_one_mini_batch(trained: Outcomes) -> None:
    """Also the last ones of an epoch, which are fewer; clipped as a whole; with a schedule of learning rates."""
    outcomes = trained["accumulated"]

    def update(replica: Classifier, optimizer: torch.optim.Optimizer, t: int) -> None:
        epoch, step = divmod(t, 6)
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** (epoch // 2)
        for indices in outcomes[0]["seen"][16 * epoch : 16 * (epoch + 1)][3 * step : 3 * (step + 1)]:
            _, x, y = dataset()[torch.tensor(indices)]
            (nn.functional.cross_entropy(replica.model(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(replica.parameters(), 0.2)
        optimizer.step()

    master = average_elastically(Classifier, OPTIMIZERS["sgd"], update, num_updates=18, force=0.5)
    for outcome in outcomes:
        assert outcome["steps"] == 18
        torch.testing.assert_close(outcome["weights"], master.weights())


class Watched(Classifier):
    """Has a head outside the pipeline and a metric, and uses random numbers before and after the layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        torch.manual_seed(4)
        self.head = nn.Linear(2, 2)
        self.accuracy = MulticlassAccuracy(2)
        self.computed: list[float] = []
        self.norms: list[list[bool]] = []

    def _shared(self, batch: Any) -> tuple[Tensor, Tensor]:
        _, x, y = batch
        output = self.head(self.model(x + 0.01 * torch.randn_like(x)))
        return output, y

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        output, y = self._shared(batch)
        self.accuracy(output, y)
        loss = nn.functional.cross_entropy(output + 0.01 * torch.randn_like(output), y)
        self.log("acc", self.accuracy, on_epoch=True, on_step=False)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return {"loss": loss, "said": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        output, y = self._shared(batch)
        self.log("val_loss", nn.functional.cross_entropy(output, y))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._shared(batch)[0]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append([p.grad is not None for p in self.parameters()])

    def on_train_epoch_end(self) -> None:
        self.computed.append(float(self.accuracy.compute()))
        self.log("epoch_acc", self.computed[-1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def watch(directory: Path) -> dict[str, Any]:
    """Trains, tests and predicts with everything that reads metrics."""
    model = Watched()
    best = ModelCheckpoint(directory, monitor="val_loss", filename="best")
    often = ModelCheckpoint(directory / "often", monitor="loss_step", every_n_train_steps=5, save_top_k=2)
    of_epoch = ModelCheckpoint(directory / "epoch", monitor="epoch_acc", mode="max", save_on_train_epoch_end=True)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    run = trainer(
        make_strategy(split_on()),
        2,
        directory,
        callbacks=[best, often, of_epoch, stopping],
        enable_checkpointing=True,
        max_epochs=5,
        val_check_interval=0.5,
        precision="bf16-mixed",
    )
    run.fit(model, train_loader(), val_loader())
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
        "norms": model.norms,
        "best": (best.best_model_path, float(best.best_model_score)),
        "of_epoch": best_epoch,
        "often": sorted(Path(path).name for path in often.best_k_models),
        "steps": run.global_step,
        "lr": lr,
        "weights": model.weights(),
        "predictions": predictions,
    }


def test_all_ranks_find_the_metrics_of_rank_0(trained: Outcomes) -> None:
    """Early stopping, checkpoints of the best, schedulers on plateaus and metric objects behave as on one process."""
    first, second = trained[watch]
    for name in ("fitted", "tested", "computed", "best", "of_epoch", "often", "steps", "lr"):
        assert first[name] == second[name], name
    assert torch.equal(first["weights"], second["weights"])
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


def fit_from(directory: Path, strategy: Any, path: Path | None) -> dict[str, Any]:
    model, world_size = Classifier(optimizer="adamw"), int(os.environ["WORLD_SIZE"])
    run = trainer(make_strategy(strategy), world_size, directory, max_epochs=2 if path else 1)
    run.fit(model, train_loader(), ckpt_path=path)
    run.save_checkpoint(directory / f"{type(run.strategy).__name__}{world_size}.ckpt")
    return {"weights": model.weights(), "steps": run.global_step}


def test_checkpoints_load_in_plain_training_and_with_more_stages(tmp_path: Path) -> None:
    """The optimizer's state is included."""
    on_ranks(fit_from, 2, tmp_path, split_on(), None, init=False)
    checkpoint = torch.load(tmp_path / "EAPipeStrategy2.ckpt", weights_only=True)
    plain = Classifier(optimizer="adamw")
    plain.load_state_dict(checkpoint["state_dict"])
    optimizer: Any = plain.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert len(optimizer.state) == 6
    assert all(state["step"] == 8 for state in optimizer.state.values())  # of 16, every other one for each replica
    three = on_ranks(fit_from, 3, tmp_path, split_on(3), tmp_path / "EAPipeStrategy2.ckpt", init=False)
    assert torch.equal(three[0]["weights"], three[2]["weights"])


# --- what a pipeline cannot train -------------------------------------------------------------------------------------


class Bad(Classifier):
    """A LightningModule that a pipeline cannot train, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "two":
            self.other = nn.Sequential(nn.Linear(6, 6))
        if kind == "none":
            self.model = nn.Linear(6, 2)  # type: ignore[assignment]
        if kind == "manual":
            self.automatic_optimization = False
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


def fit_badly(directory: Path) -> dict[str, tuple[str, str] | None]:
    cases: dict[str, tuple[Classifier, dict[str, Any], dict[str, Any]]] = {
        "module=": (Bad("two"), {}, {}),
        "has none": (Bad("none"), {}, {}),
        "automatic_optimization": (Bad("manual"), {}, {}),
        "StochasticWeightAveraging averages": (Bad(""), {}, {"callbacks": [StochasticWeightAveraging(0.1)]}),
        "16-mixed": (Bad(""), {}, {"plugins": [scaling()]}),
        "loader's iterator": (Fetching(), {}, {}),
        "split": (Bad(""), {"split": (1, 2)}, {}),
        "train_time_interval": (
            Bad(""),
            {},
            {
                "callbacks": [ModelCheckpoint(directory, monitor="loss", train_time_interval=timedelta(hours=1))],
                "enable_checkpointing": True,
            },
        ),
    }
    found = {}
    for words, (model, settings, options) in cases.items():
        run = trainer(EAPipeStrategy(**settings), 2, directory, **options)
        found[words] = raised(partial(run.fit, model, train_loader()))
    return found


def test_what_a_pipeline_cannot_train_is_refused_on_every_rank(trained: Outcomes) -> None:
    for outcomes in trained[fit_badly]:
        assert_refused(outcomes)


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


def fit_wrongly(directory: Path, kind: str) -> tuple[str, str] | None:
    strategy = EAPipeStrategy(module="model", split=(2,), timeout_s=20)
    run = trainer(strategy, 2, directory, max_epochs=1, gradient_clip_val=0.5 if kind == "clips" else None)
    make = Overriding if kind in ("skips", "again", "clips") else Bad
    return raised(lambda: run.fit(make(kind), train_loader()))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("before", "depends on parameters outside"),
        ("layers", "without a call"),
        ("twice", "called 2 times"),
        ("penalty", "on another stage"),
        ("nothing", "must return a loss"),
        ("skips", "without a step of the optimizer"),
        ("again", "twice in a step"),
        ("clips", "has left it out"),
    ],
)
def test_a_step_that_does_not_fit_is_named(kind: str, words: str, tmp_path: Path) -> None:
    """On the rank that runs it; the other rank, which may be waiting, names its peer, or raises the same."""
    outcomes = on_ranks(fit_wrongly, 2, tmp_path, kind, init=False, timeout_s=60)
    assert all(outcome is not None for outcome in outcomes)
    assert any(words in outcome[1] for outcome in outcomes)
    for outcome in outcomes:
        assert outcome[0] == "RuntimeError"
        assert words in outcome[1] or "at fault" in outcome[1]


class Estimating(Classifier):
    """Has a schedule over all steps, and a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.estimated = MulticlassAccuracy(2), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, x, y = batch
        output = self.model(x)
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy)
        return nn.functional.cross_entropy(output, y)

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def estimate(directory: Path) -> tuple[float, bool]:
    """The steps that are estimated before the method is there; and whether the metric is synchronized afterwards."""
    model = Estimating()
    trainer(make_strategy(split_on()), 2, directory, max_epochs=2).fit(model, train_loader())
    return model.estimated, bool(model.accuracy.sync_on_compute and model.accuracy._to_sync)


def test_what_is_asked_before_a_fit_and_found_after_it(tmp_path: Path) -> None:
    """All ranks see all 64 samples, in batches of 4."""
    assert on_ranks(estimate, 2, tmp_path, init=False) == [(32, True)] * 2


# --- regressions ------------------------------------------------------------------------------------------------------


class Collecting(Classifier):
    """Collects outputs for the end of the epoch, and draws random numbers in data set and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.mixed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, x, y = batch
        share = float(np.random.beta(1.0, 1.0))  # as mixup draws
        self.mixed.append(share)
        loss = share * nn.functional.cross_entropy(self.model(share * x), y)
        np.random.rand(3)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = batch
        self.outputs.append(nn.functional.cross_entropy(self.model(x), y))
        torch.randn(3)

    def on_validation_epoch_end(self) -> None:
        self.log("collected", torch.stack(self.outputs).mean())
        self.outputs.clear()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Augmented(TensorDataset):
    """Draws random numbers with torch, NumPy and Python."""

    def __getitem__(self, index: int) -> Any:
        i, x, y = super().__getitem__(index)
        return i, x + 0.01 * torch.randn_like(x) + 0.01 * float(np.random.rand()) + 0.01 * random.random(), y


def collect(directory: Path, algorithm: str) -> dict[str, Any]:
    random.seed(int(os.environ["RANK"]))  # the ranks begin with different states
    np.random.seed(int(os.environ["RANK"]))
    torch.manual_seed(int(os.environ["RANK"]))
    model = Collecting()
    world_size = int(os.environ["WORLD_SIZE"])
    run = trainer(
        make_strategy(split_on(algorithm=algorithm)),
        world_size,
        directory,
        callbacks=[EarlyStopping("collected", patience=5)],
        accumulate_grad_batches=2,
        val_check_interval=5,
        num_sanity_val_steps=1,
    )
    run.fit(model, DataLoader(Augmented(*dataset().tensors), batch_size=4, shuffle=True), val_loader())
    return {
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "mixed": model.mixed,
        "weights": model.weights(),
    }


def test_collected_outputs_and_random_numbers(trained: Outcomes) -> None:
    for algorithm in COLLECTED:
        first, second = trained["collected", algorithm]
        assert first["metrics"] == second["metrics"]
        assert "collected" in first["metrics"]
        assert torch.equal(first["weights"], second["weights"])
        if algorithm != "gpipe":  # whose loss is computed part by part
            assert first["mixed"] == second["mixed"]


def evaluate_only(directory: Path) -> list[Any]:
    model = Classifier()
    run = trainer("ea_pipe", 2, directory)
    run.validate(model, val_loader())
    validated = float(run.callback_metrics["val_loss"])
    run.test(model, val_loader())
    return [validated, float(run.callback_metrics["val_loss"]), run.predict(model, val_loader())]


def test_evaluation_without_training(trained: Outcomes) -> None:
    first, second = trained[evaluate_only]
    model = Classifier()
    _, x, y = dataset()[:]
    with torch.no_grad():
        output = model.model(x)
    expected = pytest.approx(float(nn.functional.cross_entropy(output, y)))
    assert first[0] == first[1] == second[0] == second[1] == expected
    torch.testing.assert_close(torch.cat(first[2]), output)
