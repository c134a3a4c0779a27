"""After an error a Trainer saves a checkpoint on the rank that has it, of weights that it names, for any strategy."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.methods.dear.bucket import FusedBucket
from tests.nightly.faults.test_failures import RANKS, VICTIM, assert_names, form_group, launch_jobs
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import DIED, free_port, raised
from tests.support.lightning_models import LOCAL, Classifier, make_strategy, train_loader, trainer, val_loader
from tests.support.lost_ranks import be_patient, die
from tests.support.models import loss, seeded_mlp

#: Far more than the test takes: nobody may wait for as long.
TIMEOUT_S = 300
#: The batch in which a rank is lost.
LAST = 3

#: By name: the strategy, and what its checkpoint says of the weights.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dear": ({"name": "dear", "bucket_mb": 1e-4}, "those after the last step, which all ranks have"),
    "dear, within the gather": ({"name": "dear", "bucket_mb": 1e-4}, "those before the last step, which all ranks had"),
    "dear, within the sharded gather": ({"name": "dear", "bucket_mb": 1e-4, "update": "sharded"}, "a mixture: "),
    "pipe_sgd": ({"name": "pipe_sgd"}, "those after the last update, which all ranks have"),
    "selsync": ({"name": "selsync", **LOCAL}, "those of rank 0's replica"),
    "local_sgd": ({"name": "local_sgd", "period": 2, "outer_optimizer": "nesterov"}, "those of rank 0's replica"),
    "local_sgd, overlapped": ({"name": "local_sgd", "period": 2, "overlap_steps": 1}, "those of rank 0's replica"),
    "selsync, overlapped": ({"name": "selsync", "delta": 0.0, "overlap": "forward"}, "the average of all replicas"),
    "own error": ({"name": "dear"}, "those after the last step, which all ranks have"),
    "own error in the last batch": ({"name": "dear"}, "those after the last step, which all ranks have"),
}
#: The batch in which a rank raises an error by itself.
OWN = {"own error": LAST, "own error in the last batch": 5}


class Recorder(Callback):
    """Keeps the weights after each step; in one a rank is lost."""

    def __init__(self, lose: Callable[[], object], last: int = LAST) -> None:
        self.lose, self.last, self.weights = lose, last, torch.empty(0)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            time.sleep(0.3)  # what a rank has sent is on its way
            self.lose()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        self.weights = module.weights()


def raise_error() -> None:
    raise KeyError("a bug in the loop")


def fit_until_lost(jobs: dict[str, int], folder: Path) -> dict[str, Any]:
    name, rank = form_group(jobs)
    be_patient()
    lose: Callable[[], object] = int
    if name in OWN:
        lose = raise_error if rank == 0 else int
    elif rank == VICTIM and "gather" in name:
        start = FusedBucket._start_all_gather
        gathers: list[int] = []

        def start_or_die(bucket: FusedBucket) -> Any:
            gathers.append(id(bucket))
            if gathers.count(gathers[0]) > LAST:
                time.sleep(0.3)
                die()
            return start(bucket)

        FusedBucket._start_all_gather = start_or_die  # type: ignore[method-assign]
    elif rank == VICTIM:
        lose = die
    directory = folder / name
    saver: Any = OnExceptionCheckpoint(directory, "saved")
    if name in ("dear", "selsync"):
        saver = ModelCheckpoint(directory, "saved", save_on_exception=True, save_last=True)
    strategy = make_strategy({"timeout_s": TIMEOUT_S, **CASES[name][0]})
    recorder = Recorder(lose, OWN.get(name, LAST))
    run = trainer(strategy, RANKS, directory, callbacks=[recorder, saver], enable_checkpointing=True)
    module = Classifier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raised(lambda: run.fit(module, train_loader()))
    said = [str(warning.message) for warning in caught if "after an error" in str(warning.message)]
    return {"error": error, "said": said, "agreed": recorder.weights, "own": module.weights()}


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Any]]:
    jobs = {name: free_port() for name in CASES}
    may_die = tuple(RANKS * job + VICTIM for job, name in enumerate(jobs) if name not in OWN)
    return launch_jobs(fit_until_lost, jobs, folder, may_die=may_die)


def saved(folder: Path, name: str) -> Path:
    [file] = (file for file in (folder / name).glob("*.ckpt") if not file.is_symlink() and "last" not in file.name)
    return file


def vector_of(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_that_the_message_says(name: str, outcomes: dict[str, list[Any]], folder: Path) -> None:
    own = outcomes[name][0]
    if name in OWN:
        assert own["error"] == ("KeyError", repr("a bug in the loop"))
        assert_named = [outcomes[name][rank]["error"][1].splitlines()[-1] for rank in (1, 2)]
        assert all(line.startswith("Rank 0 (host ") and "it raised KeyError" in line for line in assert_named)
    else:
        assert outcomes[name][VICTIM] == DIED
        for rank in (0, 2):
            assert_names(outcomes[name][rank]["error"][1], VICTIM, "killed", TIMEOUT_S)
    assert any(CASES[name][1] in text and "by this rank alone" in text for text in own["said"]), own["said"]
    checkpoint = torch.load(saved(folder, name), weights_only=True)
    weights = vector_of(checkpoint["state_dict"])
    assert torch.equal(weights, own["own"])
    if "which all ranks ha" in CASES[name][1]:
        assert torch.equal(weights, own["agreed"])
        assert torch.equal(weights, outcomes[name][2]["agreed"])
    elif "mixture" in CASES[name][1]:
        assert not torch.equal(weights, own["agreed"]), "the step has begun"
    if CASES[name][0]["name"] == "dear":
        assert checkpoint["global_step"] == OWN.get(name, LAST) + ("gather" in name)
    assert not outcomes[name][2]["said"], "one rank saves"


class Loaded(Classifier):
    def on_train_start(self) -> None:
        self.loaded = self.weights()


def resume(folder: Path, name: str) -> tuple[Tensor, int]:
    """Goes on by DDP."""
    module = Loaded()
    run = trainer("ddp", 2, folder / "resumed", max_steps=OWN.get(name, LAST) + 2, max_epochs=-1)
    run.fit(module, train_loader(), ckpt_path=saved(folder, name))
    return module.loaded, run.global_step


@pytest.fixture(scope="module")
def resumed(outcomes: dict[str, list[Any]], folder: Path) -> Outcomes:
    return launch_cases({name: partial(resume, folder, name) for name in CASES}, 2, init=False)


@pytest.mark.parametrize("name", CASES)
def test_ddp_resumes_from_it(name: str, resumed: Outcomes, folder: Path) -> None:
    for loaded, steps in resumed[name]:
        assert torch.equal(loaded, vector_of(torch.load(saved(folder, name), weights_only=True)["state_dict"]))
        assert steps == OWN.get(name, LAST) + 2


def resume_by_dear(folder: Path, name: str) -> tuple[list[list[int]], int, int]:
    """Goes on to the end of the epoch; returns what it trains on, its steps, and its validations."""
    module = Classifier()
    run = trainer(make_strategy({"name": "dear"}), RANKS, folder / "again", max_epochs=1)
    run.fit(module, train_loader(), val_loader(), ckpt_path=saved(folder, name) if name else None)
    return module.seen, run.global_step, len(module.validated_with)


@pytest.mark.usefixtures("outcomes")
def test_the_same_strategy_begins_with_the_batch_that_was_under_way(folder: Path) -> None:
    """And validates at the end of the epoch."""
    found = launch_cases({name: partial(resume_by_dear, folder, name) for name in ("", *OWN)}, RANKS, init=False)
    for name, last in OWN.items():
        for (whole, steps, _), (rest, steps_after, validated) in zip(found[""], found[name], strict=True):
            assert rest == whole[last:]
            assert steps_after == steps == max(OWN.values()) + 1
            assert validated == 1


def save_with_accelerate(jobs: dict[str, int], folder: Path) -> list[Any]:
    """What an except block finds that saves a state: twice, as one may."""
    name, rank = form_group(jobs)
    be_patient()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = PipeSyncAccelerator(PipeSyncPlugin(name, timeout_s=TIMEOUT_S))
    model = seeded_mlp()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def train() -> None:
        for i in range(100):
            if i == LAST and rank == VICTIM:
                die()
            optimizer.zero_grad()
            accelerator.backward(loss(wrapped, i, rank))
            optimizer.step()

    return [raised(train), *(raised(lambda: accelerator.save_state(str(folder / name))) for _ in range(2))]


def test_accelerate_refuses_to_save_a_state_by_the_rank_that_is_lost(folder: Path) -> None:
    """At once: all ranks save it together."""
    jobs = {name: free_port() for name in ("dear", "local_sgd")}
    may_die = tuple(RANKS * job + VICTIM for job in range(len(jobs)))
    for found in launch_jobs(save_with_accelerate, jobs, folder, may_die=may_die).values():
        for rank in (0, 2):
            for error in found[rank]:
                assert error is not None
                assert_names(error[1], VICTIM, "killed", TIMEOUT_S)
