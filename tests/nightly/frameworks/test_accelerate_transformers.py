"""The methods in transformers' Trainer, with a tiny BERT that needs no download."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from lightning_pipesync import PipeSyncPlugin
from lightning_pipesync.transformers import PipeSyncTrainerMixin
from tests.support.harness import on_ranks

METHODS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer", "bucket_mb": 0.01},
    "parameter_server": {"policy": "sync"},
    "local_sgd": {"period": "0.375 epoch", "overlap_steps": 2, "outer_optimizer": "nesterov"},
    "selsync": {"delta": 0.05, "window": 3},
    "pipe_sgd": {"compression": "int4"},
}
RESUMED = ("dear", "local_sgd", "selsync", "pipe_sgd")

#: Arguments of eight steps of two accumulated batches, with an evaluation and a checkpoint after each four.
OF_EIGHT_STEPS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_steps": 4,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "learning_rate": 1e-2,
}


class Sentences(Dataset):
    """64 sentences of 8 words, which are of class 1 if the first word is one of the last."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": int(words[0] > 15)}


class PipeSyncTrainer(PipeSyncTrainerMixin, Trainer):
    """As a user writes it."""


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,  # a training loader of plain Accelerate draws a number that ours does not
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def train(trainer_class: Any, folder: Path, resume: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Eight steps of two accumulated batches, with an evaluation and a checkpoint after four of them."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        **OF_EIGHT_STEPS,
        max_grad_norm=0,  # DeAR sums the norm in another order; it is still logged
    )
    trainer = trainer_class(model=bert(), args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(), **kwargs)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).clone()
    if trainer.is_world_process_zero():  # as many a script has it
        trainer.save_model(str(folder / "final"))
    trainer.evaluate()
    history = trainer.state.log_history
    trainer.args.output_dir = str(folder / "again")
    trainer.train()  # with the same model and optimizer
    trainer.evaluate()
    further = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).clone()
    trainer.accelerator.free_memory()
    return {"weights": weights, "history": history, "further": further}


class Follows(TrainerCallback):
    """Reads the weights after each step, as a running average does."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def followed(trainer_class: Any, folder: Path, **kwargs: Any) -> list[Tensor]:
    callback = Follows()
    train(trainer_class, folder, callbacks=[callback], **kwargs)
    return callback.seen


def train_all(directory: Path) -> dict[str, Any]:
    outcomes = {"ddp": train(Trainer, directory / "ddp")}
    for method, settings in METHODS.items():
        make = partial(train, PipeSyncTrainer, directory / method, pipesync=PipeSyncPlugin(method, **settings))
        outcomes[method] = make()
        if method in RESUMED:
            outcomes[f"{method}, resumed"] = make(resume=True)
    outcomes["followed"] = [
        followed(Trainer, directory / "followed ddp"),
        followed(PipeSyncTrainer, directory / "followed", pipesync=PipeSyncPlugin("dear", **METHODS["dear"])),
    ]
    return outcomes


def weights_in(file: Path, names: list[str]) -> Tensor:
    saved = load_file(file)
    return torch.cat([saved[name].flatten() for name in names])


def evaluated(history: list[dict[str, Any]]) -> list[float]:
    return [entry["eval_loss"] for entry in history if "eval_loss" in entry]


def test_trainer(tmp_path: Path) -> None:
    """DeAR trains what the Trainer does with DDP; ranks agree; a resumed run is the uninterrupted one."""
    first, second = on_ranks(partial(train_all, tmp_path), 2, init=False, timeout_s=300)
    for moment in ("weights", "further"):
        assert torch.equal(first["dear"][moment], first["ddp"][moment])
    for outcome in (first, second):
        assert all(map(torch.equal, *outcome["followed"])), "what a callback reads after a step is of that step"
    norms = [[entry["grad_norm"] for entry in first[name]["history"] if "loss" in entry] for name in ("dear", "ddp")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    names = [name for name, _ in bert().named_parameters()]
    for method in METHODS:
        weights = first[method]["weights"]
        assert torch.equal(weights, second[method]["weights"]), method
        assert method not in RESUMED or torch.equal(weights, first[f"{method}, resumed"]["weights"]), method
        assert torch.equal(weights, weights_in(tmp_path / method / "final" / "model.safetensors", names)), method
        assert (tmp_path / method / "checkpoint-4" / "pipesync_1.bin").exists()
        steps = [entry for entry in first[method]["history"] if "loss" in entry]
        assert len(steps) == 8
        assert all(f"{method}/mib_sent" in entry for entry in steps)
        losses = [evaluated(outcome[method]["history"]) for outcome in (first, second)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 3
    rounds = [entry["local_sgd/rounds"] for entry in first["local_sgd"]["history"] if "loss" in entry]
    assert rounds == [0, 0, 1, 1, 1, 2, 2, 2], "one every three of an epoch's eight steps"
    assert not torch.equal(first["selsync"]["weights"], first["ddp"]["weights"])


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (PipeSyncPlugin("ea_pipe"), "prepare_pipeline"),
        (PipeSyncPlugin("selsync", injection=(0.5, 0.5)), "injection=\\(0.5, 0.5\\)"),
        (PipeSyncPlugin("parameter_server", partition="work_queue"), "partition='work_queue'"),
    ],
)
def test_what_the_trainer_cannot_do(plugin: PipeSyncPlugin, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipeSyncTrainer(model=bert(), pipesync=plugin)
