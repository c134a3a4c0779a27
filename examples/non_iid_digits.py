"""Trains on handwritten digits of which every process has only a few kinds: without and with data injection.

    python examples/non_iid_digits.py                              two processes, five digits each
    python examples/non_iid_digits.py --processes 4                four processes, three digits each
    torchrun --nproc-per-node 2 examples/non_iid_digits.py         as with digits.py

A plain PyTorch loop, without Lightning. A process that has few digits, and trains by itself for many steps, forgets
the others. Synchronous SGD does not mind: it averages every gradient. SelSync with data injection shares some images
in place of gradients: in each step a share alpha of the processes sends a share beta of its batch to all others.

The 1,797 images come with scikit-learn. All trainings take the same number of steps, on as many images a step.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.distributed as dist
from launching import run_on_ranks
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import LabelSkewedSampler, SelSync


def load() -> list[Tensor]:
    """Returns 1,197 images to train on, 600 to test with, shape ``[count, 64]``, and the digits of either."""
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, digits, test_size=600, stratify=digits, random_state=0)
    images, test_images, labels, test_labels = map(torch.from_numpy, split)
    return [images.float(), test_images.float(), labels, test_labels]


def train(settings: dict[str, Any], data: list[Tensor], options: argparse.Namespace) -> tuple[float, float, float]:
    """Trains on all processes; returns the averaged model's accuracy, the share of local steps, and MiB sent."""
    images, test_images, labels, test_labels = data
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    # partition="defdp": the order of the data is that of the loader's own sampler, not SelDP's.
    sync = SelSync(model, optimizer, partition="defdp", **settings)
    sampler = LabelSkewedSampler(labels, math.ceil(10 / dist.get_world_size()), seed=options.seed)
    loader = sync.prepare_train_loader(
        DataLoader(TensorDataset(images, labels), batch_size=options.batch_size, sampler=sampler)
    )
    steps = 0
    while steps < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            sync.step()
            steps += 1
            if steps == options.steps:
                break

    sent = sync.metrics()["mib_sent"]
    sync.flush()  # the weights are the average of all processes' own
    accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    sync.detach()
    return accuracy, sync.lssr, sent


def run(options: argparse.Namespace) -> None:
    """Trains in each way, as one of the processes; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = load()
    trainings: dict[str, dict[str, Any]] = {"synchronous SGD": {"delta": 0.0, "aggregation": "gradients"}}
    trainings["SelSync"] = {"delta": options.delta}
    for alpha, beta in options.injection or [(0.5, 0.5), (1.0, 0.5)]:
        trainings[f"  + injection ({alpha:g}, {beta:g})"] = {"delta": options.delta, "injection": (alpha, beta)}
    table = Table(title=f"{options.steps} steps on {dist.get_world_size()} processes, delta={options.delta:g}")
    for heading in ("", "test accuracy", "local steps", "MiB sent by rank 0"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, settings in trainings.items():
        accuracy, lssr, sent = train(settings, data, options)
        table.add_row(name, f"{accuracy:.1%}", f"{lssr:.1%}", f"{sent:.2f}")
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="to start, if no launcher did (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=1.0, help="SelSync's threshold (default: %(default)s)")
    parser.add_argument(
        "--injection",
        type=float,
        nargs=2,
        action="append",
        metavar=("ALPHA", "BETA"),
        help="share of the processes, and of their batches; again for another training (default: 0.5 0.5, and 1 0.5)",
    )
    parser.add_argument("--steps", type=int, default=400, help="of every training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images a process and step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    run_on_ranks(run, parser.parse_args())


if __name__ == "__main__":
    main()
