"""Trains a small Llama, sharded by FSDP2 among the ranks of a host, with a method between hosts.

    python examples/more/sharded_llama.py                            four processes: two replicas of two ranks
    python examples/more/sharded_llama.py --strategy local_sgd       weights are averaged every 16 steps
    python examples/more/sharded_llama.py --loops fabric             in a Fabric loop only
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/more/sharded_llama.py --ranks-per-replica 8

It trains on Python's documentation, as pydoc_transformer.py does: under a Trainer, then in a Fabric loop. With the
same seed both print the same losses. The weights are random ones; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import lightning as L
import torch
from helpers.launching import parse_launch_options, trainer_options
from pydoc_transformer import PythonTopics
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipesync import DeARStrategy, LocalSGDStrategy
from lightning_pipesync.fabric import DeARFabricStrategy, LocalSGDFabricStrategy

STRATEGIES: dict[str, dict[str, Any]] = {
    "dear": {"trainer": DeARStrategy, "fabric": DeARFabricStrategy},
    "local_sgd": {"trainer": LocalSGDStrategy, "fabric": LocalSGDFabricStrategy},
}


def llama(num_characters: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=num_characters,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def shard(model: LlamaForCausalLM, device_mesh: DeviceMesh) -> LlamaForCausalLM:
    """Shards each layer, and the rest together, among the ranks of a replica."""
    mesh = device_mesh["data_parallel"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return cast("LlamaForCausalLM", fully_shard(model, mesh=mesh))


class ShardedLlama(L.LightningModule):
    """Llama over characters; it records its losses."""

    def __init__(self, num_characters: int, learning_rate: float) -> None:
        super().__init__()
        self.llama, self.learning_rate = llama(num_characters), learning_rate
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not isinstance(self.llama, FSDPModule):
            assert self.device_mesh is not None
            shard(self.llama, self.device_mesh)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        loss = self.llama(input_ids=text, labels=text).loss
        self.losses.append(loss.item())
        return cast("Tensor", loss)

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.learning_rate)


def train_in_a_trainer(strategy: Any, data: PythonTopics, options: argparse.Namespace) -> list[float]:
    model = ShardedLlama(len(data.alphabet), options.learning_rate)
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=options.max_steps,
        limit_val_batches=0,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
        **trainer_options(options),
    )
    trainer.fit(model, data.train_dataloader())
    return model.losses


def train_in_fabric(strategy: Any, data: PythonTopics, options: argparse.Namespace) -> list[float]:
    fabric = L.Fabric(
        strategy=strategy, accelerator=options.accelerator, devices=options.devices, num_nodes=options.num_nodes
    )
    fabric.launch()
    model = llama(len(data.alphabet))
    net, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=options.learning_rate))
    loader = fabric.setup_dataloaders(data.train_dataloader())
    losses: list[float] = []
    for _, text in zip(range(options.max_steps), loader, strict=False):
        optimizer.zero_grad()
        loss = net(input_ids=text, labels=text).loss
        fabric.backward(loss)
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    fabric.strategy.teardown()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="dear", help="default: %(default)s")
    parser.add_argument("--loops", nargs="+", choices=["trainer", "fabric"], default=["trainer", "fabric"])
    parser.add_argument("--ranks-per-replica", type=int, default=2, help="those of a host (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=50, help="of each training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per process (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters in a window (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: %(default)s")
    options = parse_launch_options(parser, devices=4)

    data = PythonTopics(options.context, options.batch_size)
    for loop in options.loops:
        L.seed_everything(0, verbose=False)
        layout: dict[str, Any] = {"ranks_per_replica": options.ranks_per_replica}
        if loop == "fabric":
            layout["parallelize_fn"] = shard
        strategy = STRATEGIES[options.strategy][loop](**layout)
        losses = (train_in_a_trainer if loop == "trainer" else train_in_fabric)(strategy, data, options)
        if torch.distributed.get_rank() == 0:
            replicas = torch.distributed.get_world_size() // options.ranks_per_replica
            print(f"{options.strategy}, {loop}, {replicas} replicas of {options.ranks_per_replica} ranks")
            print(f"  loss of the first step  {losses[0]:.6f}")
            print(f"  loss of step {len(losses):<10}  {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
