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
from tests.support.harness import DIED, launch, on_ranks, raised
from tests.support.lightning_models import LOCAL, Classifier, make_strategy, train_loader, trainer, val_loader
from tests.support.lost_ranks import be_patient, die, wait_for
from tests.support.models import loss, seeded_mlp

RANKS, VICTIM = 3, 1
#: The batch in which a rank is lost, or raises an error by itself, and the last one of an epoch.
LOST_IN, LAST = 3, 5

#: In which an update is under way when the recorder below is called.
EARLY = {"name": "dear", "bucket_mb": 1e-4, "wait_for_hooks": False}
#: By name: the strategy, and what its checkpoint says of the weights.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dear": ({"name": "dear", "bucket_mb": 1e-4}, "those after the last step, which all ranks have"),
    "dear, within the gather": (EARLY, "those before the last step, which all ranks had"),
    "dear, within the sharded gather": ({**EARLY, "update": "sharded"}, "a mixture: "),
    "pipe_sgd": ({"name": "pipe_sgd"}, "those after the last update, which all ranks have"),
    "selsync": ({"name": "selsync", **LOCAL}, "those of rank 0's replica"),
    "local_sgd, overlapped": ({"name": "local_sgd", "period": 2, "overlap_steps": 1}, "those of rank 0's replica"),
    "selsync, overlapped": ({"name": "selsync", "delta": 0.0, "overlap": "forward"}, "the average of all replicas"),
    "own error": ({"name": "dear"}, "those after the last step, which all ranks have"),
    "own error in the last batch": ({"name": "dear"}, "those after the last step, which all ranks have"),
}
#: The batch in which rank 0 raises an error by itself, where none is killed.
OWN = {"own error": LOST_IN, "own error in the last batch": LAST}


class Recorder(Callback):
    """Keeps the weights after each step; in one a rank is lost, once all others have had what it has sent.

    Those of Pipe-SGD need nothing more of it for this step, and end it; others wait for its gradient.
    """

    def __init__(self, lose: Callable[[], object], last: int, folder: Path, is_ahead: bool) -> None:
        self.lose, self.last, self.folder, self.is_ahead = lose, last, folder, is_ahead
        self.weights = torch.empty(0)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            if self.is_ahead and self.lose is die:
                others = [self.folder / f"{rank} has ended it" for rank in range(RANKS) if rank != VICTIM]
                wait_for(lambda: all(file.exists() for file in others))
            time.sleep(0.3)  # what a rank has sent is on its way
            self.lose()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights = module.weights()
        if batch_idx == self.last:
            (self.folder / f"{trainer.global_rank} has ended it").touch()


def raise_error() -> None:
    raise KeyError("a bug in the loop")


def die_within_a_gather() -> None:
    start = FusedBucket._start_all_gather
    gathers: list[int] = []

    def start_or_die(bucket: FusedBucket) -> Any:
        gathers.append(id(bucket))
        if gathers.count(gathers[0]) > LOST_IN:
            time.sleep(0.3)
            die()
        return start(bucket)

    FusedBucket._start_all_gather = start_or_die  # type: ignore[method-assign]


def fit_until_lost(name: str, folder: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    be_patient(6)
    lose: Callable[[], object] = int
    if name in OWN:
        lose = raise_error if rank == 0 else int
    elif rank == VICTIM and "gather" in name:
        die_within_a_gather()
    elif rank == VICTIM:
        lose = die
    saver: Any = OnExceptionCheckpoint(folder, "saved")
    if name in ("dear", "selsync"):
        saver = ModelCheckpoint(folder, "saved", save_on_exception=True, save_last=True)
    strategy = make_strategy({"timeout_s": 300, **CASES[name][0]})
    recorder = Recorder(lose, OWN.get(name, LOST_IN), folder, is_ahead=name == "pipe_sgd")
    run = trainer(strategy, RANKS, folder, callbacks=[recorder, saver], enable_checkpointing=True)
    module = Classifier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raised(lambda: run.fit(module, train_loader()))
    said = [str(warning.message) for warning in caught if "after an error" in str(warning.message)]
    return {"error": error, "said": said, "agreed": recorder.weights, "own": module.weights()}


def assert_names(error: tuple[str, str] | None, rank: int, how: str) -> None:
    assert error is not None
    last = error[1].splitlines()[-1]
    assert last.startswith(f"Rank {rank} (host "), error[1]
    assert how in last


class Loaded(Classifier):
    def on_train_start(self) -> None:
        self.loaded = self.weights()


def resume_by_ddp(file: Path, max_steps: int) -> tuple[Tensor, int]:
    module = Loaded()
    run = trainer("ddp", 2, file.parent / "resumed", max_steps=max_steps, max_epochs=-1)
    run.fit(module, train_loader(), ckpt_path=file)
    return module.loaded, run.global_step


def resume_by_dear(folder: Path, file: Path | None) -> tuple[list[list[int]], int, int]:
    """Goes on to the end of the epoch; returns what it trains on, its steps, and its validations."""
    module = Classifier()
    run = trainer(make_strategy({"name": "dear"}), RANKS, folder / "again", max_epochs=1)
    run.fit(module, train_loader(), val_loader(), ckpt_path=file)
    return module.seen, run.global_step, len(module.validated_with)


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_that_the_message_says(name: str, tmp_path: Path) -> None:
    """DDP resumes from them; and the same strategy begins with the batch in which a rank has raised an error."""
    last, says = OWN.get(name, LOST_IN), CASES[name][1]
    may_die = () if name in OWN else (VICTIM,)
    outcomes = launch(fit_until_lost, RANKS, name, tmp_path, init=False, may_die=may_die)
    if name in OWN:
        assert outcomes[0]["error"] == ("KeyError", repr("a bug in the loop"))
        for rank in (1, 2):
            assert_names(outcomes[rank]["error"], 0, "it raised KeyError")
    else:
        assert outcomes[VICTIM] == DIED
        for rank in (0, 2):
            assert_names(outcomes[rank]["error"], VICTIM, "has died")
    own, other = outcomes[0], outcomes[2]
    assert any(says in text and "by this rank alone" in text for text in own["said"]), own["said"]
    assert not other["said"], "one rank saves"
    [file] = (file for file in tmp_path.glob("*.ckpt") if not file.is_symlink() and "last" not in file.name)
    checkpoint = torch.load(file, weights_only=True)
    weights = torch.cat([value.flatten() for value in checkpoint["state_dict"].values()])
    assert torch.equal(weights, own["own"])
    if "which all ranks ha" in says:
        assert torch.equal(weights, own["agreed"])
        assert torch.equal(weights, other["agreed"])
    elif "mixture" in says:
        assert not torch.equal(weights, own["agreed"]), "the step has begun"
    if CASES[name][0]["name"] == "dear":
        assert checkpoint["global_step"] == last + ("gather" in name)
    for loaded, steps in on_ranks(resume_by_ddp, 2, file, last + 2, init=False):
        assert torch.equal(loaded, weights)
        assert steps == last + 2
    if name in OWN:
        wholes = on_ranks(resume_by_dear, RANKS, tmp_path, None, init=False)
        rests = on_ranks(resume_by_dear, RANKS, tmp_path, file, init=False)
        for (whole, steps, _), (rest, steps_after, validated) in zip(wholes, rests, strict=True):
            assert rest == whole[last:]
            assert steps_after == steps == LAST + 1
            assert validated == 1


def save_with_accelerate(folder: Path) -> list[Any]:
    """What an except block finds that saves a state: twice, as one may."""
    rank = int(os.environ["RANK"])
    be_patient(6)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = PipeSyncAccelerator(PipeSyncPlugin("local_sgd", timeout_s=300))
    model = seeded_mlp()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def train() -> None:
        for i in range(100):
            if i == LOST_IN and rank == VICTIM:
                die()
            optimizer.zero_grad()
            accelerator.backward(loss(wrapped, i, rank))
            optimizer.step()

    save = partial(accelerator.save_state, str(folder))
    return [raised(train), raised(save), raised(save)]


def test_accelerate_refuses_to_save_a_state_by_the_rank_that_is_lost(tmp_path: Path) -> None:
    """At once: all ranks save it together."""
    found = launch(save_with_accelerate, RANKS, tmp_path, init=False, may_die=(VICTIM,))
    for rank in (0, 2):
        for error in found[rank]:
            assert_names(error, VICTIM, "has died")
