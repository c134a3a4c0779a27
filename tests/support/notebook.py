"""The first cells of a user's notebook, which define trainings."""

from __future__ import annotations

CELLS = """
import torch
import lightning_pipesync
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

QUIET = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "max_epochs": 1}

def fit(strategy, folder):
    saving = callbacks.ModelCheckpoint(folder, save_weights_only=True)
    model, trainer = Model(), Trainer(strategy=strategy, callbacks=saving, **QUIET)
    trainer.fit(model, DataLoader(torch.ones(32, 8), 4))
    saved = torch.load(saving.best_model_path, weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
        assert not torch.equal(value, Model().state_dict()[name]), name
    assert trainer.callback_metrics["loss"] > 0

def train(fabric):
    model = Model()
    model, optimizer = fabric.setup(model.layers, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(model(torch.ones(4, 8)).mean())
    optimizer.step()
    return fabric.world_size

def train_with_fabric(strategy):
    assert Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train) == 2
"""
