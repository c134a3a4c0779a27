"""Trains on handwritten digits in a plain PyTorch loop.

torchrun --nproc-per-node 2 examples/plain_loop_digits.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import DeAR

images, digits = map(torch.tensor, load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(images.float() / 16, digits), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

dist.init_process_group("gloo")
sync = DeAR(model, optimizer)
loader = sync.prepare_train_loader(loader)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sync.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
sync.flush()  # from here on the weights may be evaluated and saved
sync.detach()
dist.destroy_process_group()
