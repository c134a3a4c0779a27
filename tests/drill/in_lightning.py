"""The training that is drilled, in Fabric and in a Trainer; imported where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.utils.data import DataLoader

from tests.drill.phases import EPOCHS, STEPS_OF_EPOCH, Gate
from tests.drill.training import BATCH_SIZE, DividesData, Loop, Samples, Task, loss_of, optimizer_of


class FabricLoop(Loop):
    """A loop in Fabric's words."""

    def __init__(self, task: Task, gate: Gate) -> None:
        super().__init__(task, gate)
        self.strategy: Any = STRATEGY_REGISTRY[task.method]["strategy"](**task.all_settings)
        self.fabric = Fabric(accelerator="cpu", devices=1, num_nodes=task.size, strategy=self.strategy)
        self.fabric.launch()
        self.model = task.network(gate)
        gate.reach("attach")
        self.called, self.optimizer = self.fabric.setup(self.model, optimizer_of(self.model.parameters()))

    def train_on(self, x: Tensor, y: Tensor) -> None:
        self.fabric.backward(self.loss(self.called(x), y))
        self.gate.reach("step")
        self.optimizer.step()
        self.called.zero_grad()

    def consolidate(self) -> None:
        with self.strategy.consolidated():
            pass

    def save(self, path: Path) -> None:
        self.fabric.save(path, {"model": self.called, "optimizer": self.optimizer})

    def load(self, path: Path) -> None:
        self.fabric.load(path, {"model": self.called, "optimizer": self.optimizer})

    def end(self) -> None:
        with self.strategy.consolidated():
            weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.strategy.teardown()
        self.model.load_state_dict(weights)


class FabricJob(DividesData, FabricLoop):
    """A loop in Fabric's words in a job that is a replica."""

    @property
    def method(self) -> Any:
        return self.strategy.method_of()

    def prepare(self, loader: DataLoader[Any]) -> Any:
        return self.strategy.prepare_train_loader(loader)

    def end(self) -> None:
        self.method.end()
        super().end()


class Module(pl.LightningModule):
    """The network in a Trainer, whose hooks are the gate's phases."""

    def __init__(self, task: Task, gate: Gate) -> None:
        super().__init__()
        self.gate, self.model = gate, task.network(gate)

    def configure_optimizers(self) -> Any:
        self.gate.reach("attach")
        return optimizer_of(self.model.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # training_step is not called on all stages
        self.gate.step += 1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.gate.poison(loss_of(self.model(x), y))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gate.reach("step")

    def on_validation_start(self) -> None:
        self.gate.reach("flush")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The weights are the consolidated ones."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.gate.reach("checkpoint")

    def on_train_end(self) -> None:
        self.gate.reach("end")


def fit(task: Task, gate: Gate, resumed: Path | None) -> dict[str, Tensor]:
    """Trains in a Trainer; returns the consolidated weights."""
    saver = ModelCheckpoint(
        task.folder, "at-{step}", every_n_train_steps=STEPS_OF_EPOCH, save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=task.size,
        strategy=StrategyRegistry[task.method]["strategy"](**task.all_settings),
        max_epochs=EPOCHS,
        callbacks=[saver],
        default_root_dir=task.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if task.pipelined else 1,
    )
    readers = 1 if task.pipelined else task.ranks
    module = Module(task, gate)
    loader = DataLoader(Samples(readers), BATCH_SIZE, shuffle=True)
    trainer.fit(module, loader, DataLoader(Samples(readers), BATCH_SIZE), ckpt_path=resumed)
    return module.model.state_dict()
