"""Trains on handwritten digits where each process has only some of the digits: without and with data injection.

    python examples/more/non_iid_digits.py                              two processes, five digits each
    python examples/more/non_iid_digits.py --processes 4                four processes, three digits each
    torchrun --nproc-per-node 2 examples/more/non_iid_digits.py         as with digits.py

A plain PyTorch loop, without Lightning. A process that has few digits, and trains alone for many steps, forgets
the others. Synchronous SGD is not affected, since it averages every gradient. SelSync with data injection shares some
images instead of gradients: in each step a share alpha of the processes sends a share beta of its batch to all others.

The 1,797 images come with scikit-learn. All trainings have the same number of steps, and of images per step.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.distributed as dist
from helpers.digit_images import split_digits
from helpers.launching import run_on_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import LabelSkewedSampler, SelSync


def train(
    settings: dict[str, Any], data: tuple[Tensor, ...], options: argparse.Namespace
) -> tuple[float, float, float]:
    """Trains on all processes; returns the averaged model's accuracy, the share of local steps, and MiB sent."""
    images, test_images, labels, test_labels = data
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    # partition="defdp": keeps the order of the loader's sampler, instead of SelDP's.
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
    sync.flush()  # the weights are now the average over all processes
    accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    sync.detach()
    return accuracy, sync.lssr, sent


def run(options: argparse.Namespace) -> None:
    """Runs all trainings on this process; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = split_digits()
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
    parser.add_argument("--processes", type=int, default=2, help="to start without a launcher (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=1.0, help="SelSync's threshold (default: %(default)s)")
    parser.add_argument(
        "--injection",
        type=float,
        nargs=2,
        action="append",
        metavar=("ALPHA", "BETA"),
        help="share of the processes, and of their batches; repeat for more runs (default: 0.5 0.5, and 1 0.5)",
    )
    parser.add_argument("--steps", type=int, default=400, help="of every training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    run_on_ranks(run, parser.parse_args())


if __name__ == "__main__":
    main()
