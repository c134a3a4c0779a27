"""Trains on handwritten digits in a loop of Accelerate.

torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin

images, digits = map(torch.tensor, load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(images.float() / 16, digits), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

accelerator = PipeSyncAccelerator(pipesync=PipeSyncPlugin("dear"))
model, optimizer = accelerator.prepare(model, optimizer)
loader = accelerator.prepare_train_loader(loader)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch + 1}: loss {loss:.3f}")
accelerator.end_training()
