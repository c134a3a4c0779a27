"""Trains on handwritten digits under Lightning's Trainer, on two processes of this machine.

python examples/lightning_digits.py
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipesync  # noqa: F401  registers the strategies by name


class DigitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, digits = batch
        loss = nn.functional.cross_entropy(self.layers(images), digits)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


images, digits = map(torch.tensor, load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(images.float() / 16, digits), batch_size=16, shuffle=True)

if __name__ == "__main__":
    trainer = L.Trainer(strategy="dear", accelerator="cpu", devices=2, max_epochs=5)
    trainer.fit(DigitClassifier(), loader)
