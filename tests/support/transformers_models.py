"""A tiny BERT and a tiny Llama that need no download, their data, and what trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from tests.support.accelerate_runs import end

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


class Follows(TrainerCallback):
    """Reads the weights after each step, as a running average does."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(flat(model))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def train(trainer_class: Any, folder: Path, resume: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Eight steps of two accumulated batches, with an evaluation and a checkpoint after four of them; and again."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        **OF_EIGHT_STEPS,
        max_grad_norm=0,  # DeAR sums the norm in another order; it is still logged
    )
    follows = Follows()
    trainer = trainer_class(
        model=bert(), args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(), callbacks=[follows], **kwargs
    )
    tqdm.monitor_interval = 0  # what saves a model would start a thread that stays
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    weights = flat(trainer.model)
    if trainer.is_world_process_zero():  # as many a script has it
        trainer.save_model(str(folder / "final"))
    trainer.evaluate()
    history = trainer.state.log_history
    trainer.args.output_dir = str(folder / "again")
    trainer.train()  # with the same model and optimizer
    trainer.evaluate()
    further = flat(trainer.model)
    end(trainer.accelerator)
    return {
        "weights": weights,
        "further": further,
        "followed": follows.seen,
        "steps": [entry for entry in history if "loss" in entry],
        "losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    }


def weights_in(file: Path) -> Tensor:
    saved = load_file(file)
    return torch.cat([saved[name].flatten() for name, _ in bert().named_parameters()])


class Words(Dataset):
    """64 texts of 8 words, each of which follows from the one before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = (index + 3 * torch.arange(8)) % 32
        return {"input_ids": words, "labels": words}


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
