"""transformers' Trainers as jobs of their own, of which one dies, and comes back at the others' step."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from lightning_pipesync import LocalSGD, PipeSyncPlugin
from tests.nightly.frameworks.test_accelerate_transformers import OF_EIGHT_STEPS, PipeSyncTrainer, Sentences, bert
from tests.references.elastic_data import Data, seen
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import DIED
from tests.support.replica_jobs import (
    DIES,
    TIMEOUT_S,
    WAITS,
    as_replica,
    dies_and_comes_back,
    launch_replicas,
    lighthouse,
)

SEED, PERIOD = 7, 2
#: The step before which one dies, and that before which the others wait until it has started again.


class Watched(TrainerCallback):
    """Records (step, learning rate) before each step; may act then."""

    def __init__(self, act: Any = lambda _: None) -> None:
        self.steps: list[tuple[int, float]] = []
        self.act = act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(state.global_step)
        self.steps.append((state.global_step, kwargs["optimizer"].param_groups[0]["lr"]))


class Recording(PipeSyncTrainer):
    """Records the samples that it trains on, by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[int]] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append(inputs.pop("number").tolist())
        return super().training_step(model, inputs, *args, **kwargs)


class Numbered(Sentences):
    """Sentences with their numbers."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "number": index}


def trainer_of(folder: Path, watched: TrainerCallback, rank: int = 0, **arguments: Any) -> Recording:
    given = {**OF_EIGHT_STEPS, "remove_unused_columns": False, "max_grad_norm": 0.0, "seed": SEED, **arguments}
    given["metric_for_best_model"] = "loss"
    plugin = PipeSyncPlugin("local_sgd", period=PERIOD, timeout_s=TIMEOUT_S)
    model = bert()
    with torch.no_grad():
        model.classifier.weight.add_(rank)  # a job that comes has other weights before
    return Recording(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Numbered(),
        eval_dataset=Sentences(),
        callbacks=[watched, EarlyStoppingCallback(100)],
        pipesync=plugin,
    )


def weights_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


# --- one dies, and comes back -----------------------------------------------------------------------------------------


def train(rank: int, directory: Path) -> dict[str, Any]:
    """Trains as the job ``rank``; the last one is job 1, when it comes back."""
    comes_back = rank == 3
    rank, act = dies_and_comes_back(rank, 1, 3, directory)
    watched = Watched(act)
    trainer = trainer_of(directory / f"{rank}{comes_back}", watched, rank, max_steps=18)
    prepare = trainer.accelerator.prepare

    def prepare_and_tell(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        if comes_back and isinstance(prepared, tuple):
            (directory / "started").touch()  # it is alive, so that the others wait for it in their next round
        return prepared

    trainer.accelerator.prepare = prepare_and_tell  # type: ignore[method-assign]
    trainer.train()
    losses = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return {
        "steps": watched.steps,
        "seen": trainer.seen,
        "weights": weights_of(trainer.model),
        "epoch": trainer.state.epoch,
        "evaluated": losses,
        "best": trainer.state.best_metric,
        "patience": next(
            one.early_stopping_patience_counter
            for one in trainer.callback_handler.callbacks
            if isinstance(one, EarlyStoppingCallback)
        ),
    }


def batches_of(steps: int) -> int:
    """Returns the number of batches in so many steps, of two each: in an epoch of the Trainer, eleven in six steps."""
    return steps // 6 * 11 + steps % 6 * 2


def test_one_dies_and_comes_back(tmp_path: Path) -> None:
    of_0, died, of_2, again = launch_replicas(train, 4, tmp_path, num_replicas=3, may_die=(1,))
    assert died == DIED
    came = again["steps"][0][0]
    assert came > WAITS
    for outcome in (of_0, of_2):
        assert [step for step, _ in outcome["steps"]] == list(range(18))
        assert outcome["steps"][came:] == again["steps"]
        assert torch.equal(outcome["weights"], again["weights"])
        assert outcome["evaluated"] == again["evaluated"]
        assert outcome["best"] == again["best"]
        assert outcome["patience"] == again["patience"]
        assert outcome["epoch"] == again["epoch"]
    # The data go on from one of their epochs to the next, within an epoch of the Trainer.
    lost = DIES + 1
    expected = seen(Data(64, 2), {0: "012", batches_of(lost): "02", batches_of(came): "012"}, 6)
    assert of_0["seen"] == [batch for _, batch in expected["0"]][: batches_of(18)]
    assert of_2["seen"] == [batch for _, batch in expected["2"]][: batches_of(18)]
    assert (
        again["seen"] == [batch for _, batch in expected["1"]][batches_of(lost) :][: batches_of(18) - batches_of(came)]
    )


# --- what jobs do that stay -------------------------------------------------------------------------------------------


def in_plain_loop(rank: int) -> tuple[list[list[int]], Tensor]:
    """Eight steps of two batches each, as the Trainer takes them."""
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (8 - step) / 8)
    sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S)
    loader, batches = sync.prepare_train_loader(DataLoader(Numbered(), 2, shuffle=True), seed=SEED), []
    for batch in loader:
        batches.append(batch.pop("number").tolist())
        model(**batch, num_items_in_batch=torch.tensor(4)).loss.backward()  # of the sentences of a step
        if len(batches) % 2 == 0:
            sync.step()
            scheduler.step()
            optimizer.zero_grad()
    sync.end()
    sync.detach()
    return batches, weights_of(model)


def in_trainer(rank: int, directory: Path, resumes: bool = False) -> tuple[Any, ...]:
    watched = Watched()
    trainer = trainer_of(directory / str(rank), watched, rank, optim="adamw_torch")
    checkpoint = directory / str(rank) / "checkpoint-4"
    trainer.train(resume_from_checkpoint=str(checkpoint) if resumes else None)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    weights = weights_of(trainer.model)
    trainer.accelerator.free_memory()
    return trainer.seen, weights, losses, watched.steps


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    cases = {
        "in a plain loop": in_plain_loop,
        "in the Trainer": partial(in_trainer, directory=folder),
        "resumed": partial(in_trainer, directory=folder, resumes=True),
    }
    with ExitStack() as stack:
        addresses = {name: stack.enter_context(lighthouse()) for name in cases}
        yield launch_cases(
            {name: partial(as_replica, function, addresses[name], 2) for name, function in cases.items()}, 2, init=False
        )


def test_the_same_members_train_as_in_a_plain_loop(trained: Outcomes) -> None:
    for (batches, weights), (of_trainer, others, losses, _) in zip(
        trained["in a plain loop"], trained["in the Trainer"], strict=True
    ):
        assert batches == of_trainer
        assert torch.equal(weights, others)
        assert losses == trained["in the Trainer"][0][2]
        assert len(losses) == 2


def test_a_resumed_run_is_the_uninterrupted_one(trained: Outcomes) -> None:
    for (batches, weights, losses, steps), (rest, others, resumed, of_rest) in zip(
        trained["in the Trainer"], trained["resumed"], strict=True
    ):
        assert rest == batches[8:]
        assert of_rest == steps[4:]
        assert torch.equal(weights, others)
        assert resumed == losses
