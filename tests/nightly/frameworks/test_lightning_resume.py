"""Checkpoints at every moment of a Trainer's run, with loaders of every kind: what is resumed is the same run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_pipesync import SelDPSampler
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised, slots
from tests.support.lightning_models import (
    Classifier,
    batches,
    dataset,
    make_strategy,
    scaling,
    train_loader,
    trainer,
    val_loader,
)

#: When the checkpoint is written, after how many steps, and after how many batches.
MOMENTS: dict[str, tuple[dict[str, Any], int, int]] = {
    **{f"step {step}": ({"every_n_train_steps": step}, step, step) for step in (3, 5, 8, 11, 13, 29)},
    "validation": ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, 8, 8),
    "validation within": ({"save_on_train_epoch_end": False}, 4, 4),
    "accumulated": ({"every_n_train_steps": 5}, 5, 10),
    # By its mode, which has no effect, a Trainer tells it from the one of the validation.
    "epoch end": ({"every_n_epochs": 1, "save_on_train_epoch_end": True, "mode": "max"}, 8, 8),
    "epoch end without validation": ({"every_n_epochs": 1}, 8, 8),
}


class Recorder(Classifier):
    """It trains on batches of one loader, or of several; a loader that is used up gives None."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        several = batch if isinstance(batch[0], list) or batch[0] is None else [batch]
        self.seen.append([None if part is None else part[0].tolist() for part in several])
        parts = [part for part in several if part is not None]
        loss = sum(nn.functional.cross_entropy(self.model(x), y) for _, x, y in parts)
        self.log("loss", loss)
        return loss


class OneCycle(Recorder):
    """Has a schedule for which the loaders are set up before a checkpoint's position is known."""

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


class Resumable(DataLoader):
    """Knows itself where it stopped, and goes on from there."""

    fetched = skipped = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.skipped = self.skipped, 0
        for i, batch in enumerate(super().__iter__()):
            self.fetched = i + 1
            if i >= skipped:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"fetched": self.fetched}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["fetched"]


def combined(mode: Any) -> CombinedLoader:
    """16, 8 and 2 batches an epoch; the last also leaves 3 of its 11 samples out each time."""
    few = Subset(dataset(), range(22))
    return CombinedLoader([train_loader(2), train_loader(4), DataLoader(few, 4, shuffle=True, drop_last=True)], mode)


def own_sampler() -> DataLoader:
    data = dataset()
    return DataLoader(data, 4, sampler=SelDPSampler(data, 2, int(os.environ["RANK"]), seed=3), num_workers=1)


# 64 samples, 2 ranks, batches of 4: 8 batches an epoch. A change of 0.1 gives steps of both kinds.
MIXED = {"delta": 0.1, "smoothing": 0.3}
MODULE = {"optimizer": "adamw", "batch_norm": True, "dropout": 0.3, "scheduler": True}
RANDOM: dict[str, Any] = {"optimizer": "adamw", "dropout": 0.2}


@dataclass(frozen=True)
class Case:
    """A training, and the moments from which it is resumed."""

    moments: tuple[str, ...]
    module: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: MIXED)
    loader: Callable[[], Any] = train_loader
    make: type[Classifier] = Recorder
    ema: bool = False
    scaled: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def augmented() -> DataLoader:
    return DataLoader(Augmented(), 4, shuffle=True)


CASES = {
    "everything": Case(("step 5", "step 11", "validation", "epoch end"), MODULE),
    # Lightning does not make good the validation that was due, and its loader would have drawn a random number.
    "last batch": Case(("step 8",), {**MODULE, "dropout": 0.0}),
    "DeAR": Case(("step 8",), {"optimizer": "adamw"}, {"name": "dear"}),
    "validation within": Case(("validation within",), MODULE, arguments={"val_check_interval": 0.5}),
    "no validation": Case(("epoch end without validation",), MODULE, arguments={"limit_val_batches": 0}),
    "full pass, EMA": Case(("step 5",), {"batch_norm": True}, {**MIXED, "full_pass": True}, ema=True),
    "injection, loss scaling": Case(
        ("step 5",), {}, {**MIXED, "partition": "seldp", "injection": (0.5, 0.5)}, scaled=True
    ),
    "Pipe-SGD, loss scaling": Case(("step 3",), {**MODULE, "dropout": 0}, {"name": "pipe_sgd"}, scaled=True),
    "random numbers, SelSync": Case(("step 3", "epoch end"), RANDOM, {}, augmented, OneCycle),
    "random numbers, DeAR": Case(("step 3", "epoch end"), RANDOM, {"name": "dear"}, augmented, OneCycle),
    "max_size_cycle": Case(("step 13", "step 29"), loader=partial(combined, "max_size_cycle")),
    "max_size": Case(("step 13",), loader=partial(combined, "max_size")),
    "min_size": Case(("step 5",), loader=partial(combined, "min_size"), arguments={"max_epochs": 4}),
    "no batches": Case(("step 5",), loader=lambda: DataLoader(batches(), batch_size=None, shuffle=True)),
    "resumable": Case(("step 13",), loader=lambda: Resumable(dataset(), 4, shuffle=True), arguments={"max_epochs": 3}),
}
#: Worker processes have fetched ahead of training when the checkpoint is written.
WITH_WORKERS = {
    "accumulated": Case(
        ("accumulated",), loader=partial(train_loader, 2, num_workers=1), arguments={"accumulate_grad_batches": 2}
    ),
    "own sampler": Case(("step 5",), loader=own_sampler),
}
RESUMED = [(name, moment) for name, case in {**CASES, **WITH_WORKERS}.items() for moment in case.moments]


def run(name: str, folder: Path, moment: str | None, **changed: Any) -> dict[str, Any]:
    """Trains some epochs at once, or again from the checkpoint of a moment."""
    case = {**CASES, **WITH_WORKERS}[name]
    rank, folder, path = int(os.environ["RANK"]), folder / name, None
    savers = {one: MOMENTS[one][0] for one in case.moments}
    if moment is not None:
        path = folder / moment / f"step={MOMENTS[moment][1]}.ckpt"
        assert path.exists(), list(folder.rglob("*"))
        folder = folder / "resumed" / moment
    torch.manual_seed(100 + rank)  # dropout differs by rank
    model = case.make(**case.module)
    torch.manual_seed(100 + rank)
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.8)] if case.ema else []
    callbacks += [ModelCheckpoint(folder / one, "{step}", save_top_k=-1, **how) for one, how in savers.items()]
    fitting = trainer(
        make_strategy({**case.settings, **changed}), int(os.environ["WORLD_SIZE"]), folder, callbacks=callbacks,
        enable_checkpointing=True, plugins=[scaling()] if case.scaled else [], **case.arguments,
    )  # fmt: skip
    # A Trainer removes what a launcher has set.
    with mock.patch.dict(os.environ), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        fitting.fit(model, case.loader(), val_loader(), ckpt_path=path)
        assert warnings.filters == filters
    said = [str(warning.message) for warning in caught]
    metrics = {name: float(value) for name, value in fitting.callback_metrics.items()}
    return {
        "weights": model.weights(), "seen": model.seen, "validated_with": model.validated_with, "said": said,
        "metrics": {name: metrics.get(name) for name in ("selsync/lssr", "loss", "val_loss", "pipe_sgd/updates")},
    }  # fmt: skip


def save_small(folder: Path) -> list[dict[str, Any]]:
    """Local steps, without the replicas in the checkpoint: at once, and resumed."""
    return [run("last batch", folder, moment, delta=1e9, checkpoint_replicas=False) for moment in (None, "step 8")]


def resume_wrongly(folder: Path, name: str, moment: str, **changed: Any) -> tuple[str, str] | None:
    return raised(lambda: run(name, folder, moment, **changed))


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        (name, moment): partial(run, name, folder, moment)
        for name, case in CASES.items()
        for moment in (None, *case.moments)
    }
    cases["small"] = partial(save_small, folder / "small")
    cases["refused"] = partial(resume_wrongly, folder, "last batch", "step 8", compression="int8")
    return launch_cases(cases, 2, init=False)


@pytest.fixture(scope="module")
def with_workers(folder: Path) -> dict[Any, Any]:
    """Each in a call of its own, as workers are forked."""
    cases = [(name, moment) for name, case in WITH_WORKERS.items() for moment in (None, *case.moments)]
    return {(name, moment): on_ranks(run, 2, name, folder, moment, init=False) for name, moment in cases}


@pytest.mark.parametrize(("name", "moment"), RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, moment: str, request: pytest.FixtureRequest) -> None:
    """Bit for bit: weights of each rank, optimizer, tracker, buffers, dropout, schedule, loss scale; the next batch."""
    outcomes = request.getfixturevalue("with_workers" if name in WITH_WORKERS else "trained")
    for whole, resumed in zip(outcomes[name, None], outcomes[name, moment], strict=True):
        assert resumed["seen"]
        assert resumed["seen"] == whole["seen"][MOMENTS[moment][2] :], "the next unseen batch, and no other"
        assert torch.equal(resumed["weights"], whole["weights"])
        assert resumed["metrics"] == whole["metrics"]
        assert not any("not resumable" in said for said in resumed["said"])


def test_a_checkpoint_holds_the_average_and_each_replica(trained: Outcomes, folder: Path) -> None:
    """Or, small, the average alone, from which all ranks resume."""
    whole = trained["everything", None][0]
    saved = torch.load(folder / "everything" / "validation" / "step=8.ckpt", weights_only=True)
    average = torch.cat([value.flatten() for value in saved["state_dict"].values() if value.is_floating_point()])
    assert torch.equal(average, whole["validated_with"][0])
    assert sorted(saved["pipesync"]["ranks"]) == [0, 1]
    (_, first), (_, second) = trained["small"]
    [small] = (folder / "small" / "last batch" / "step 8").glob("step=8.ckpt")
    assert "ranks" not in torch.load(small, weights_only=True)["pipesync"]
    assert torch.equal(first["weights"], second["weights"])


def test_what_cannot_be_resumed_is_named(trained: Outcomes) -> None:
    for outcome in trained["refused"]:
        assert_refused({"int8": outcome})


def test_another_number_of_ranks(trained: Outcomes, folder: Path) -> None:
    """Gradients in flight are dropped, which is said; what the ranks had of their own is refused."""
    assert trained["Pipe-SGD, loss scaling", None]
    cases: dict[str, Any] = {
        "pipe_sgd": partial(run, "Pipe-SGD, loss scaling", folder, "step 3"),
        "dear": partial(run, "DeAR", folder, "step 8"),
        "selsync": partial(resume_wrongly, folder, "everything", "validation"),
    }
    [outcome] = (outcomes := launch_cases(cases, 1, init=False))["pipe_sgd"]
    lost = "The checkpoint is of 2 ranks, and there are 1: gradients in flight are dropped"
    assert sum(lost in one for one in outcome["said"]) == 1
    assert outcomes["dear"][0]["seen"]
    assert not any("there are 1" in one for one in outcomes["dear"][0]["said"])
    assert_refused({"state of 2 ranks": outcomes["selsync"][0], "1": outcomes["selsync"][0]})


@pytest.mark.parametrize("name", ["dear", "local_sgd"])
def test_restoring_in_the_process_that_has_spawned_the_ranks(name: str, tmp_path: Path) -> None:
    """It has no method, and its module has no Trainer: as under DDP, the optimizer is restored."""
    saving = ModelCheckpoint(tmp_path, filename="last")
    strategy = make_strategy({"name": name, "start_method": "spawn"})
    run = trainer(strategy, 1, tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    model = Classifier(optimizer="adamw")
    with slots(1):
        run.fit(model, train_loader())
    run.strategy.optimizers = [model.configure_optimizers()]
    run._checkpoint_connector.restore(tmp_path / "last.ckpt")
    assert all(state["step"] == 16 for state in run.optimizers[0].state.values())
    assert len(run.optimizers[0].state) > 0
