"""``python -m benchmarks.overhead``: what SelSync's tracker and Pipe-SGD's prediction add to a step's computation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import command
from lightning_pipesync import PipeSGD, SelSync
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.tables import table_of
from lightning_pipesync.lab.bench.timing import timed

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-4),
}
_VOCABULARY = 2900
#: The first steps allocate, and Pipe-SGD's first one predicts nothing.
_WARM_UP = 2


class Encoder(nn.Module):
    """A Transformer encoder of 25 M parameters with a classifier over its vocabulary."""

    def __init__(self, width: int = 512, depth: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


@dataclass(frozen=True, kw_only=True)
class Overhead(Benchmark):
    """Times steps of a Transformer encoder, and the parts of them that SelSync and Pipe-SGD add.

    Steps of plain local training, local steps of SelSync (delta so high that none is synchronized) and steps of
    Pipe-SGD take turns, so that the noise of the machine meets all alike. Within them their own parts are timed:
    measuring the gradient's norm, and the flag, sent before the update and awaited behind it; the trial step on copies
    of the weights.

    Attributes:
        steps: Steps of each kind.
        optimizer: sgd, with momentum, or adamw.
        batch_size: Sequences of a step on each rank.
        sequence: Tokens of a sequence.
        threads: CPU threads of a rank.
    """

    steps: int = 30
    optimizer: str = "sgd"
    batch_size: int = 8
    sequence: int = 64
    threads: int = 1

    name = "overhead"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} is not known; there are {', '.join(OPTIMIZERS)}.")
        self._check_positive("steps", "batch_size", "sequence", "threads")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return self.steps + _WARM_UP

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times the steps on this rank; a collective call. The seconds are those of the first rank."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        tokens = torch.randint(_VOCABULARY, (self.batch_size, self.sequence))
        model = Encoder()
        models = model, deepcopy(model), deepcopy(model)
        plain, local, piped = (OPTIMIZERS[self.optimizer](one.parameters()) for one in models)
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
        for i in range(self.steps + _WARM_UP):
            for step in (plain_step, local_step, piped_step):
                dist.barrier()
                for name, value in step().items():
                    if i >= _WARM_UP:
                        seconds.setdefault(name, []).append(value)
            progress(f"step {i + 1}")
        selsync.detach()
        pipe.detach()
        shared = {"settings": self.settings(), "world_size": dist.get_world_size()}
        return {**shared, "parameters": sum(parameter.numel() for parameter in model.parameters()), "seconds": seconds}

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(map(_table, results))

    def draw(self, results: list[dict[str, Any]]) -> None:
        """There is no picture."""


def _table(result: dict[str, Any]) -> str:
    settings, seconds = result["settings"], result["seconds"]
    step = median(seconds["plain step"])
    rows = table_of(
        seconds.items(),
        {
            "": lambda row: row[0],
            "median ms": lambda row: f"{1e3 * median(row[1]):.2f}",
            "quartiles ms": lambda row: " to ".join(f"{1e3 * quantiles(row[1], n=4)[i]:.2f}" for i in (0, 2)),
            "share of a plain step": lambda row: f"{median(row[1]) / step:.2%}",
        },
    )
    size = (
        f"{result['parameters'] / 1e6:.1f} M parameters, {settings['batch_size'] * settings['sequence']} tokens a step"
    )
    return (
        f"{size}, {settings['optimizer']}, {result['world_size']} processes of {settings['threads']} threads:\n\n{rows}"
    )


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.overhead:Overhead"))
