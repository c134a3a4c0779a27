"""transformers' Trainers as jobs of their own, of which one dies, and comes back at the others' step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer
from tests.references.elastic_data import Data, seen
from tests.support.harness import DIED
from tests.support.replica_jobs import DIES, TIMEOUT_S, WAITS, dies_and_comes_back, launch_replicas
from tests.support.transformers_models import OF_EIGHT_STEPS, Sentences, bert, flat


class Watched(TrainerCallback):
    """Records (step, learning rate) before each step; may act then."""

    def __init__(self, act: Any) -> None:
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


def train(rank: int, directory: Path) -> dict[str, Any]:
    """Trains as the job ``rank``; the last one is job 1, when it comes back."""
    comes_back = rank == 3
    rank, act = dies_and_comes_back(rank, 1, 3, directory)
    watched, model = Watched(act), bert()
    with torch.no_grad():
        model.classifier.weight.add_(rank)  # a job that comes has other weights before
    given = {**OF_EIGHT_STEPS, "remove_unused_columns": False, "max_grad_norm": 0.0, "seed": 7, "max_steps": 18}
    given["metric_for_best_model"] = "loss"
    trainer = Recording(
        model=model,
        args=TrainingArguments(output_dir=str(directory / f"{rank}{comes_back}"), **given),
        train_dataset=Numbered(),
        eval_dataset=Sentences(),
        callbacks=[watched, EarlyStoppingCallback(100)],
        pipesync=PipeSyncPlugin("local_sgd", period=2, timeout_s=TIMEOUT_S),
    )
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
        "weights": flat(trainer.model),
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
