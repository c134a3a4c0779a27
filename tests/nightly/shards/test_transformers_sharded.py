"""The methods in transformers' Trainer with ``fsdp``: a small Llama of two replicas of two shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_pipesync import PipeSyncPlugin
from lightning_pipesync.transformers import PipeSyncTrainerMixin
from tests.nightly.frameworks.test_accelerate_transformers import OF_EIGHT_STEPS
from tests.nightly.shards.test_accelerate_sharded import OnCpu, ParallelismConfig, fresh_state
from tests.nightly.shards.test_sharded_replicas import REPLICAS, SHARDS, whole
from tests.support.case_table import Outcomes, launch_cases

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("FULL_STATE_DICT", {"bucket_mb": 0.01}),
    "selsync": ("SHARDED_STATE_DICT", {"delta": 0.05, "window": 3}),
}


class Words(Dataset):
    """64 texts of 8 words, each of which follows from the one before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = (index + 3 * torch.arange(8)) % 32
        return {"input_ids": words, "labels": words}


class PipeSyncTrainer(PipeSyncTrainerMixin, Trainer):
    """As a user writes it."""


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def train(trainer_class: Any, folder: Path, kind: str, resume: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Eight steps of two accumulated batches, evaluated and saved after four and eight; the best one is loaded."""
    config_type = OnCpu if trainer_class is Trainer else ParallelismConfig
    with fresh_state():
        arguments = TrainingArguments(
            output_dir=str(folder),
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind},
            parallelism_config=config_type(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
            **OF_EIGHT_STEPS,
            load_best_model_at_end=True,
        )
        if trainer_class is Trainer:
            arguments.parallelism_config.plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        data = Words()
        trainer = trainer_class(model=llama(), args=arguments, train_dataset=data, eval_dataset=data, **kwargs)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
        found = {"weights": whole(trainer.model), "history": trainer.state.log_history}
        found["best"] = trainer.state.best_model_checkpoint
        trainer.save_model(str(folder / "final"))
        trainer.evaluate()
        if trainer_class is not Trainer:  # for which Accelerate cannot prepare a sharded model again
            trainer.args.output_dir = str(folder / "again")
            trainer.train()  # with the same model and optimizer
            found["further"] = whole(trainer.model)
        trainer.accelerator.free_memory()
        return found


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {"hsdp": partial(train, Trainer, folder / "hsdp", "FULL_STATE_DICT")}
    for method, (kind, settings) in METHODS.items():
        plugin = PipeSyncPlugin(method, timeout_s=60, **settings)
        for resumed in (False, True):
            cases[method, resumed] = partial(train, PipeSyncTrainer, folder / method, kind, resumed, pipesync=plugin)
    return launch_cases(cases, REPLICAS * SHARDS, init=False)


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_of_shards(method: str, trained: Outcomes, folder: Path) -> None:
    """DeAR trains what the Trainer does with FSDP2 on both dimensions; ranks agree; a resumed run is the whole one."""
    runs = trained[method, False]
    for run, resumed, hsdp in zip(runs, trained[method, True], trained["hsdp"], strict=True):
        for moment in ("weights", "further"):
            assert all(map(torch.equal, run[moment], runs[0][moment]))
            assert all(map(torch.equal, run[moment], resumed[moment]))
        if method == "dear":  # bit for bit, but for the norm by which it clips
            for found, expected in zip(run["weights"], hsdp["weights"], strict=True):
                torch.testing.assert_close(found, expected)
        assert run["best"] is not None
        losses = [entry["eval_loss"] for entry in run["history"] if "eval_loss" in entry]
        assert len(losses) >= 2
        assert losses == [entry["eval_loss"] for entry in runs[0]["history"] if "eval_loss" in entry]
        steps = [entry for entry in run["history"] if "loss" in entry]
        assert all(f"{method}/mib_sent" in entry for entry in steps)
    assert (folder / method / "checkpoint-4" / "pipesync_3.bin").exists()
    if METHODS[method][0] == "FULL_STATE_DICT":
        plain = llama()
        plain.load_state_dict(load_file(folder / method / "final" / "model.safetensors"))
        assert all(map(torch.equal, plain.parameters(), runs[0]["weights"]))
