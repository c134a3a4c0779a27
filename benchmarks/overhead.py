"""What SelSync's tracker and flag, and Pipe-SGD's prediction, add to a step's computation.

A Transformer encoder of 25 M parameters trains on several processes. Steps of plain local training, local steps of
SelSync (delta so high that none is synchronized) and steps of Pipe-SGD take turns, so that the noise of the machine
meets all alike. Within them their own parts are timed: measuring the gradient's norm, and the flag, sent before the
update and awaited behind it; the trial step on copies of the weights.

    python -m benchmarks.overhead
    torchrun --nproc-per-node 4 -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from examples.launching import run_on_ranks
from lightning_pipesync import PipeSGD, SelSync

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-4),
}


class Encoder(nn.Module):
    """A Transformer encoder with a classifier over its vocabulary."""

    def __init__(self, width: int = 512, depth: int = 7, vocabulary: int = 2900) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def timed(function: Callable[[], object]) -> float:
    """Returns how many seconds ``function`` takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> None:
    """Times the steps on this rank; rank 0 prints the table."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokens = torch.randint(2900, (args.batch_size, args.sequence))
    model = Encoder()
    models = model, deepcopy(model), deepcopy(model)
    plain, local, piped = (OPTIMIZERS[args.optimizer](one.parameters()) for one in models)
    selsync, pipe = SelSync(models[1], local, delta=1e9), PipeSGD(models[2], piped)

    def backward(model: nn.Module) -> None:
        model.zero_grad()
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    def plain_step() -> dict[str, float]:
        compute = timed(lambda: backward(models[0]))
        return {"plain step": compute + timed(plain.step)}

    def local_step() -> dict[str, float]:
        compute = timed(lambda: backward(models[1]))
        tracker = timed(selsync.reduce)
        start = time.perf_counter()
        update = selsync.step(lambda: timed(local.step))
        assert update is not None
        flag = time.perf_counter() - start - update
        return {"local step of SelSync": compute + tracker + update + flag, "tracker": tracker, "flag": flag}

    def piped_step() -> dict[str, float]:
        prediction = timed(pipe.use_predicted_weights)
        backward(models[2])
        pipe.step()
        pipe.flush()  # nothing of it travels under the next step
        pipe.resume()
        return {"prediction of Pipe-SGD": prediction}

    seconds: dict[str, list[float]] = {}
    for i in range(args.steps + 2):
        for step in (plain_step, local_step, piped_step):
            dist.barrier()
            for name, value in step().items():
                if i > 1:  # the first two allocate, and Pipe-SGD's first one predicts nothing
                    seconds.setdefault(name, []).append(value)
    selsync.detach()
    pipe.detach()
    if dist.get_rank() == 0:
        report(seconds, sum(parameter.numel() for parameter in model.parameters()))


def report(seconds: dict[str, list[float]], num_parameters: int) -> None:
    """Prints medians, quartiles and shares of the plain step."""
    table = Table(title=f"Steps, {num_parameters / 1e6:.1f} M parameters, {dist.get_world_size()} processes")
    for heading in ("", "median ms", "quartiles ms", "share of a plain step"):
        table.add_column(heading, justify="left" if not heading else "right")
    step = statistics.median(seconds["plain step"])
    for name, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        table.add_row(name, f"{median * 1e3:.2f}", f"{low * 1e3:.2f} - {high * 1e3:.2f}", f"{median / step:.2%}")
    Console().print(table)


def run(args: argparse.Namespace) -> None:
    """Measures on this rank."""
    dist.init_process_group("gloo")
    measure(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each kind")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="SGD with momentum, or AdamW")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step and process")
    parser.add_argument("--sequence", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--processes", type=int, default=2, help="processes to start, if no launcher did")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads a process")
    arguments = parser.parse_args()
    run_on_ranks(run, arguments)
