"""transformers' Trainers as jobs of two ranks, among which FSDP2 shards the model: a small Llama."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from lightning_pipesync import PipeSyncPlugin
from tests.nightly.frameworks.test_accelerate_transformers import OF_EIGHT_STEPS
from tests.nightly.shards.test_accelerate_sharded import ParallelismConfig, fresh_state
from tests.nightly.shards.test_sharded_replicas import whole
from tests.nightly.shards.test_transformers_sharded import PipeSyncTrainer, Words, llama
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas

FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "FULL_STATE_DICT"}


def train(folder: Path, resumes: bool) -> dict[str, Any]:
    """Eight steps of two batches, evaluated and saved after each four of them."""
    with fresh_state():
        arguments = TrainingArguments(
            output_dir=str(folder),
            fsdp=True,
            fsdp_config=FSDP,
            parallelism_config=ParallelismConfig(dp_shard_size=2),
            **OF_EIGHT_STEPS,
        )
        plugin = PipeSyncPlugin("local_sgd", period=2, outer_optimizer="nesterov", timeout_s=TIMEOUT_S)
        data = {"train_dataset": Words(), "eval_dataset": Words()}
        trainer = PipeSyncTrainer(model=llama(), args=arguments, pipesync=plugin, **data)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resumes else None)
        weights = torch.cat([tensor.flatten() for tensor in whole(trainer.model)])
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trainer.accelerator.free_memory()
        return {"weights": weights, "losses": losses}


def train_and_resume(replica: int, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # in this job
    folder = directory / str(replica)
    return train(folder, resumes=False), train(folder, resumes=True)


def test_replicas_agree_and_resume_bit_for_bit(tmp_path: Path) -> None:
    outcomes = launch_replicas(train_and_resume, 2, tmp_path, ranks_per_replica=2)
    first = outcomes[0][0]
    assert len(first["losses"]) == 2
    for uninterrupted, resumed in outcomes:
        for outcome in (uninterrupted, resumed):
            assert torch.equal(outcome["weights"], first["weights"])
            assert outcome["losses"] == first["losses"]
