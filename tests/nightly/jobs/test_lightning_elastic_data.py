"""Trainers as jobs that come and go: the same epochs, steps and samples, wherever a job comes in.

A stand-in for the method's part says who is there from which step on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD, LocalSGDStrategy
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.training.registry import METHODS
from tests.references.elastic_data import Data, seen
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import launch, raised
from tests.support.lightning_models import SAMPLES, Classifier, dataset, trainer, val_loader

EPOCHS = 3
#: Who is there from the step on: 64 samples in batches of 4.
MEMBERS = {0: "ab", 5: "a", 8: "bac", 13: "ca", 22: "abc"}


class Members:
    """In place of a method's transport."""

    place_of_data = (0, 1)


class Jobs(LocalSGD):
    """Local SGD whose members change as the table says, for the job ``name``; it comes after ``first`` steps."""

    members: dict[int, str]
    name: str
    first: int
    handed: dict[int, Any]  # by step, what a job that comes after it gets

    def hand_over(self, **parts: Any) -> None:
        self.parts = parts

    def join(self) -> None:
        self.taken = self.first
        self.data.transport = cast("Transport", Members())
        if self.first in self.handed:
            position, states, groups = self.handed[self.first]
            self.data.go_to(position)
            for name, part in self.parts.items():
                part.load_state_dict(states[name])
            for group, hyperparameters in zip(self.optimizers[0].param_groups, groups, strict=True):
                group.update(hyperparameters)
        self._change()
        if self.first in self.handed:
            self.data.skip_ended_epochs()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.first:  # another job comes before this step: its learning rates are those of it
            states = {name: part.state_dict() for name, part in self.parts.items()}
            groups = [{"lr": group["lr"]} for group in self.optimizers[0].param_groups]
            self.handed[self.taken] = self.position, states, groups
        result = super().step(*args, **kwargs)
        self.taken += 1
        self._change()
        return result

    def _change(self) -> None:
        self.position = self.data.position()
        present = self.members[max(since for since in self.members if since <= self.taken)]
        cast("Members", self.data.transport).place_of_data = present.index(self.name), len(present)
        self.data.redivide()


class Recorder(Classifier):
    """Notes where it is in the training at each hook."""

    def __init__(self) -> None:
        super().__init__(scheduler=True)
        self.hooks: list[tuple[Any, ...]] = []

    def note(self, hook: str, *more: Any) -> None:
        self.hooks.append((hook, self.trainer.current_epoch, self.trainer.global_step, *more))

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}, {"scheduler": by_epoch}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("batch", batch_idx, self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_start(self) -> None:
        self.note("epoch")

    def on_train_epoch_end(self) -> None:
        self.note("epoch's end", self.trainer.num_training_batches, self.trainer.is_last_batch)

    def on_validation_start(self) -> None:
        self.note("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note("checkpoint")


@contextmanager
def elastic(name: str, first: int, handed: dict[int, Any], members: dict[int, str]) -> Iterator[None]:
    """Context in which local SGD has these members."""
    method = type("LocalSGD", (Jobs,), {"members": members, "name": name, "first": first, "handed": handed})
    several = mock.patch.object(LocalSGDConfig, "num_jobs", property(lambda _: 2))
    with mock.patch.dict(METHODS, local_sgd=method), several:
        yield


def job(
    directory: Path,
    name: str,
    first: int,
    handed: dict[int, Any],
    ckpt_path: Path | None = None,
    members: dict[int, str] = MEMBERS,
    loading: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Trains as a job that comes after ``first`` steps; returns its samples and hooks, and adds to ``handed``."""
    pl.seed_everything(7, verbose=False)
    model = Recorder()
    saving = ModelCheckpoint(directory / f"{name}{first}", save_top_k=-1, every_n_train_steps=4)
    settings = {"max_epochs": EPOCHS, "callbacks": [saving], "enable_checkpointing": True, **kwargs}
    loader = DataLoader(dataset(), 4, shuffle=True, **(loading or {}))
    with elastic(name, first, handed, members):
        run = trainer(LocalSGDStrategy(partition="defdp"), 1, directory, **settings)
        run.fit(model, loader, val_loader(), ckpt_path=ckpt_path)
    saved = sorted(path.name for path in (directory / f"{name}{first}").glob("*"))
    return {"seen": model.seen, "hooks": model.hooks, "saved": saved, "steps": run.global_step}


def jobs(
    directory: Path, **kwargs: Any
) -> tuple[dict[str, Any], dict[int, dict[str, Any]], dict[str, Any], dict[int, dict[str, Any]]]:
    """Trains job a all the time; job a again as if it came after each of some steps; and job c when it comes.

    The last that are returned resume from the checkpoints of job a.
    """
    handed: dict[int, Any] = {}
    whole = job(directory, "a", 0, handed, **kwargs)
    later = {first: job(directory, "a", first, handed, **kwargs) for first in (5, 10, whole["steps"] - 1)}
    comes = next(step for step, names in kwargs.get("members", MEMBERS).items() if "c" in names)
    of_c = job(directory, "c", comes, handed, **kwargs)
    saved = {int(path.stem.split("step=")[1]): path for path in (directory / "a0").glob("*.ckpt")}
    resumed = {
        step: job(directory / "r", "a", step, {}, ckpt_path=path, **kwargs)
        for step, path in saved.items()
        if step < whole["steps"]
    }
    return whole, later, of_c, resumed


def several_loaders(directory: Path) -> tuple[str, str] | None:
    loaders = CombinedLoader([DataLoader(dataset(), 4), DataLoader(dataset(), 4)])
    with elastic("a", 0, {}, MEMBERS):
        return raised(lambda: trainer(LocalSGDStrategy(partition="defdp"), 1, directory).fit(Classifier(), loaders))


#: Where 8 samples are left, 3 members come, who cannot make whole batches of them.
NONE_LEFT = {0: "ab", 7: "bac", 13: "ca"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing left": {"loading": {"drop_last": True}, "members": NONE_LEFT},
    "seldom validated": {"val_check_interval": 7, "accumulate_grad_batches": 2},
    "validated within": {"val_check_interval": 0.5},
    "steps": {"max_epochs": -1, "max_steps": 24, "limit_train_batches": 0.75},
}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Callable[[], Any]] = {
        name: partial(jobs, folder / name, **kwargs) for name, kwargs in VARIANTS.items()
    }
    cases["several loaders"] = partial(several_loaders, folder)
    return launch_cases(cases, 1, init=False)


@pytest.mark.parametrize("variant", ["plain", "validated within"])
def test_jobs_train_on_what_is_left_of_an_epoch_and_end_it_where_the_data_end(variant: str, trained: Outcomes) -> None:
    whole, _, of_c, _ = trained[variant][0]
    expected = seen(Data(SAMPLES, 4), MEMBERS, EPOCHS)
    assert whole["seen"] == [batch for _, batch in expected["a"]]
    assert of_c["seen"] == [batch for _, batch in expected["c"]]
    ends = [hook for hook in whole["hooks"] if hook[0] == "epoch's end"]
    lengths = [sum(of == epoch for of, _ in expected["a"]) for epoch in range(EPOCHS)]
    assert [(length, last) for *_, length, last in ends] == [(length, True) for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_job_that_comes_is_where_the_others_are(variant: str, trained: Outcomes) -> None:
    """Its epochs, batches, global steps, learning rates, validation and checkpoints are theirs from there on."""
    whole, later, *_ = trained[variant][0]
    for first, came in later.items():
        begin = next(i for i, hook in enumerate(whole["hooks"]) if hook[0] == "batch" and hook[2] == first)
        if whole["hooks"][begin - 1][0] == "epoch":
            begin -= 1
        assert came["hooks"] == whole["hooks"][begin:]
        assert came["steps"] == whole["steps"]
        assert came["seen"] == whole["seen"][len(whole["seen"]) - len(came["seen"]) :]
        assert came["saved"] == [name for name in whole["saved"] if int(name.split("step=")[1].split(".")[0]) > first]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_job_resumes_within_an_epoch_that_was_divided_before(variant: str, trained: Outcomes) -> None:
    whole, _, _, resumed = trained[variant][0]
    for step, run in resumed.items():
        begin = next(i for i, hook in enumerate(whole["hooks"]) if hook[0] == "batch" and hook[2] == step)
        assert [hook for hook in run["hooks"] if hook[0] == "batch"] == [
            hook for hook in whole["hooks"][begin:] if hook[0] == "batch"
        ]
        assert run["seen"] == whole["seen"][len(whole["seen"]) - len(run["seen"]) :]
        assert run["steps"] == whole["steps"]


def test_an_epoch_ends_when_new_members_cannot_divide_the_rest(trained: Outcomes) -> None:
    whole, _, of_c, _ = trained["nothing left"][0]
    expected = seen(Data(SAMPLES, 4, drop_last=True), NONE_LEFT, EPOCHS)["a"]
    assert sum(epoch == 0 for epoch, _ in expected) == 7
    assert whole["seen"] == [batch for _, batch in expected]
    ends = [hook for hook in whole["hooks"] if hook[0] == "epoch's end"]
    assert ends[0] == ("epoch's end", 0, 7, 7, True)
    assert sum(hook[:3] == ("validation", 0, 7) for hook in whole["hooks"]) == 1
    assert of_c["hooks"] == [hook for hook in whole["hooks"] if hook[1] > 0], "who comes then begins with the next one"


def test_validation_comes_at_the_end_of_the_data_also_of_an_epoch_that_has_become_short(trained: Outcomes) -> None:
    whole, *_ = trained["plain"][0]
    validated, ended = (
        [hook[1:3] for hook in whole["hooks"] if hook[0] == kind] for kind in ("validation", "epoch's end")
    )
    assert validated == ended
    whole, *_ = trained["seldom validated"][0]
    assert {epoch for hook, epoch, *_ in whole["hooks"] if hook == "validation"} == set(range(EPOCHS))


def test_several_training_loaders_are_refused(trained: Outcomes) -> None:
    error = trained["several loaders"][0]
    assert error is not None
    assert "2 training loaders" in error[1]


def job_with_workers(directory: Path, first: int, handed: dict[int, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    return job(directory, "a", first, handed, loading={"num_workers": 2}, max_epochs=2), handed


def test_what_workers_have_fetched_of_the_old_division_is_thrown_away(tmp_path: Path) -> None:
    """Their processes are forked, so each job trains in a new process."""
    [(whole, handed)] = launch(partial(job_with_workers, tmp_path, 0, {}), 1, init=False)
    [(came, _)] = launch(partial(job_with_workers, tmp_path, 5, handed), 1, init=False)
    assert whole["seen"] == [batch for _, batch in seen(Data(SAMPLES, 4), MEMBERS, 2)["a"]]
    assert came["seen"] == whole["seen"][5:]
