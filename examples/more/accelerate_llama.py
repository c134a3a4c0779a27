"""Trains a small Llama that is sharded within each host, with a method between the hosts, under Accelerate.

    python examples/more/accelerate_llama.py                       four processes here, as two hosts of two
    python examples/more/accelerate_llama.py --trainer             the same in transformers' Trainer
    python examples/more/accelerate_llama.py --method local_sgd
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/more/accelerate_llama.py --hosts 2

The model has random weights, and the text is what `help()` shows on language topics, from the standard library.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pydoc_data.topics import topics

import torch
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from helpers.launching import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin, PipeSyncTrainer

CONTEXT = 32


class Windows(Dataset[dict[str, Tensor]]):
    """The topics, divided into windows of CONTEXT characters."""

    def __init__(self) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        self.alphabet = sorted(set(text))
        places = {character: place for place, character in enumerate(self.alphabet)}
        self.text = torch.tensor([places[character] for character in text])

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def new_llama(num_characters: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_characters,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
        )
    )


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    data = Windows()
    model, plugin = new_llama(len(data.alphabet)), PipeSyncPlugin(options.method)
    ranks_per_host = int(os.environ["WORLD_SIZE"]) // options.hosts
    mesh = ParallelismConfig(dp_replicate_size=options.hosts, dp_shard_size=ranks_per_host)
    run = train_by_trainer if options.trainer else train_in_a_loop
    losses, metrics = run(options, model, data, plugin, mesh)
    if os.environ["RANK"] == "0":
        print(f"{options.method} between {options.hosts} hosts of {ranks_per_host} ranks, {options.steps} steps")
        print(f"  loss of the first and the last step  {losses[0]:.3f}  {losses[-1]:.3f}")
        print(f"  MiB sent by rank 0                   {metrics[f'{options.method}/mib_sent']:.2f}")


def train_in_a_loop(
    options: argparse.Namespace,
    model: LlamaForCausalLM,
    data: Windows,
    plugin: PipeSyncPlugin,
    mesh: ParallelismConfig,
) -> tuple[list[float], dict[str, float]]:
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = PipeSyncAccelerator(plugin, parallelism_config=mesh, fsdp_plugin=sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    llama, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare_train_loader(DataLoader(data, batch_size=8, shuffle=True, drop_last=True))
    losses = []
    for _, batch in zip(range(options.steps), loader, strict=False):
        loss = llama(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    metrics = accelerator.metrics()
    accelerator.end_training()
    return losses, metrics


def train_by_trainer(
    options: argparse.Namespace,
    model: LlamaForCausalLM,
    data: Windows,
    plugin: PipeSyncPlugin,
    mesh: ParallelismConfig,
) -> tuple[list[float], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            fsdp=True,
            fsdp_config={"version": 2},
            parallelism_config=mesh,
            use_cpu=not torch.cuda.is_available(),
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = PipeSyncTrainer(model=model, args=arguments, train_dataset=data, pipesync=plugin)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.accelerator.end_training()
    return [entry["loss"] for entry in steps], steps[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dear", help="the method between the hosts (default: %(default)s)")
    parser.add_argument("--trainer", action="store_true", help="train in transformers' Trainer")
    parser.add_argument("--hosts", type=int, default=2, help="replicas (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="without torchrun (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: %(default)s")
    run_on_ranks(train, parser.parse_args())
