"""Trains scikit-learn's handwritten digits with Accelerate; the method comes from the environment or a YAML file.

pipesync launch --config_file integrations/accelerate/selsync_cpu.yaml examples/more/accelerate_methods.py
PIPESYNC_METHOD=selsync accelerate launch --config_file integrations/accelerate/cpu.yaml examples/more/...
PIPESYNC_METHOD=local_sgd pipesync launch --replicas 2 examples/more/accelerate_methods.py     # jobs that come and go
"""

from __future__ import annotations

import argparse

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_pipesync import PipeSyncAccelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="images per process and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()

    set_seed(0)
    accelerator = PipeSyncAccelerator()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set, test_set = random_split(TensorDataset(images, labels), [2 / 3, 1 / 3])
    train_loader = accelerator.prepare_train_loader(DataLoader(train_set, options.batch_size, shuffle=True))

    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    if accelerator.pipesync is not None and accelerator.pipesync.method == "ea_pipe":
        accuracy = train_pipeline(accelerator, layers, train_loader, DataLoader(test_set, 64), options)
    else:
        accuracy = train(accelerator, layers, train_loader, DataLoader(test_set, 64), options)

    method = "no method" if accelerator.pipesync is None else accelerator.pipesync.method
    accelerator.print(f"{method} on {accelerator.num_processes} processes: test accuracy {accuracy:.1%}")
    for name, value in accelerator.metrics().items():
        accelerator.print(f"{name:32} {value:.4g}")
    accelerator.end_training()


def train(
    accelerator: PipeSyncAccelerator,
    model: nn.Module,
    train_loader: DataLoader,
    test_loader: DataLoader,
    options: argparse.Namespace,
) -> float:
    """Trains with an ordinary loop of Accelerate; returns the accuracy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100 * accelerator.num_processes, gamma=0.7)
    model, optimizer, scheduler, test_loader = accelerator.prepare(model, optimizer, scheduler, test_loader)
    first = train_loader.epoch if accelerator.is_job else 0  # a job that comes later begins where the others are
    for _ in range(first, options.epochs):
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.end()  # on all processes: the weights become the consolidated ones
    model.eval()
    hits = []
    for x, y in test_loader:
        with torch.no_grad():
            predicted = model(x).argmax(dim=1)
        hits.append(accelerator.gather_for_metrics(predicted == y))
    return torch.cat(hits).float().mean().item()


def train_pipeline(
    accelerator: PipeSyncAccelerator,
    layers: nn.Sequential,
    train_loader: DataLoader,
    test_loader: DataLoader,
    options: argparse.Namespace,
) -> float:
    """Trains a pipeline with one stage per process; returns the accuracy on the first process, 0 on the others."""
    engine = accelerator.prepare_pipeline(
        layers,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=options.lr, momentum=0.9),
    )
    test_loader = accelerator.prepare(test_loader)
    for _ in range(options.epochs):
        layers.train()
        for batch in train_loader:
            engine.train_batch(batch)
    engine.flush()
    layers.eval()
    hits = []
    for x, y in test_loader:
        output = engine.forward(x)
        if accelerator.is_main_process:  # it has the last stage
            hits.append(output.argmax(dim=1) == y)
    return torch.cat(hits).float().mean().item() if hits else 0.0


if __name__ == "__main__":
    main()
