"""Trains on handwritten digits in a loop of Lightning's Fabric, on two processes of this machine.

python examples/fabric_digits.py
"""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipesync  # noqa: F401  registers the strategies by name

images, digits = map(torch.tensor, load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(images.float() / 16, digits), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

fabric = Fabric(strategy="dear", accelerator="cpu", devices=2)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"epoch {epoch + 1}: loss {loss:.3f}")
