"""The training in Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from tests.conformance.methods import Method
from tests.conformance.shards import device_mesh, shard
from tests.conformance.training import (
    BATCH_SIZE,
    BATCHES,
    EPOCHS,
    Checkpoint,
    Options,
    Result,
    flat,
    flat_state,
    loss_of,
    network,
    optimizers_of,
    pass_by,
    replica_of_process,
    scaler_of,
    scheduler_of,
)
from tests.support.lightning_models import dataset, trainer, val_loader


class Module(pl.LightningModule):
    """Trains the network; steps several optimizers by hand."""

    def __init__(self, options: Options, scheduled: bool) -> None:
        super().__init__()
        self.model = network(options, replica_of_process(options))
        self.options, self.scheduled = options, scheduled
        self.automatic_optimization = not options.several
        self.seen: list[list[int]] = []
        self.loaded: Tensor | None = None

    def configure_model(self) -> None:
        if self.options.ranks_per_replica > 1 and not isinstance(self.model, FSDPModule):
            shard(self.model, device_mesh(self.options)["shards"])

    def configure_optimizers(self) -> Any:
        optimizers = optimizers_of(self.model, self.options)
        if not self.scheduled:
            return optimizers
        return optimizers, [{"scheduler": scheduler_of(one, self.options), "interval": "step"} for one in optimizers]

    def on_train_start(self) -> None:
        self.loaded = flat(self.model)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Any:
        indices, x, y = batch
        self.seen.append(indices.tolist())
        loss = loss_of(self.model(x), y)
        if self.automatic_optimization:
            return loss
        turn = batch_idx % 2
        optimizer = self.optimizers()[turn]
        self.manual_backward(loss)
        self.clip_gradients(optimizer, self.options.clip_value, "value")
        optimizer.step()
        self.zero_grad()
        self.lr_schedulers()[turn].step()
        return None

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Finds consolidated weights, from which the training does not continue."""
        pass_by(self.options, "validation", self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return pass_by(self.options, "batch", self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass_by(self.options, "step", self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass_by(self.options, "saving", self)

    def on_train_end(self) -> None:
        pass_by(self.options, "end", self)


def fit(
    method: Method | None,
    settings: dict[str, Any],
    options: Options,
    save: Checkpoint | None = None,
    resume: Checkpoint | None = None,
) -> Result:
    """Trains in a Trainer."""
    strategy = "ddp" if method is None else StrategyRegistry[method.name]["strategy"](**settings)
    arguments: dict[str, Any] = {
        "limit_train_batches": options.batches,
        "accumulate_grad_batches": options.accumulate,
        "log_every_n_steps": BATCHES,
        "limit_val_batches": 0 if options.dropout or (method is not None and method.pipeline) else 1,
        "val_check_interval": 3,
    }
    if not options.several:  # otherwise the module clips
        arguments["gradient_clip_val"] = options.clip_norm or options.clip_value
        arguments["gradient_clip_algorithm"] = "value" if options.clip_value else "norm"
    if options.precision == "16-mixed":  # which the Trainer would quietly make bf16-mixed
        arguments["plugins"] = [MixedPrecision("16-mixed", options.device, scaler_of(options))]
    elif options.precision != "32":
        arguments["precision"] = options.precision
    if save is not None:
        name = f"{save.path.name}-{{step}}"
        saver = ModelCheckpoint(
            save.path.parent,
            name,
            every_n_train_steps=save.at,
            save_top_k=-1,
            auto_insert_metric_name=False,
            save_on_exception=save.after_error,  # which is no reason to wait for a rank that is lost
        )
        arguments |= {"callbacks": [saver], "enable_checkpointing": True}
    module = Module(options, scheduled=method is None or not method.pipeline)
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")) + (0 if resume is None else resume.at))
    run = trainer(strategy, options.ranks, "/tmp", accelerator=options.device, max_epochs=EPOCHS, **arguments)
    loader = DataLoader(dataset(), BATCH_SIZE, shuffle=True)
    run.fit(module, loader, val_loader(), ckpt_path=None if resume is None else f"{resume.path}.ckpt")
    scaler = getattr(run.precision_plugin, "scaler", None)
    return Result(flat(module.model), module.seen, module.loaded, 1.0 if scaler is None else scaler.get_scale())


def saved_weights(path: Any) -> Tensor:
    return flat_state(torch.load(f"{path}.ckpt", weights_only=True)["state_dict"])
