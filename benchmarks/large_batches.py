"""``python -m benchmarks.large_batches``: the accuracy of large mini-batches, by what is done to the learning rate.

The lecture's "Training Error Vs Batch Size" and "Learning Rates for Large Minibatches" (Goyal et al., 2017).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import benchmarks.tasks.mnist1d
import benchmarks.tasks.signals  # noqa: F401 - both add themselves to the tasks
from benchmarks import command
from benchmarks.intervals import interval_of, with_interval
from benchmarks.tasks import Task, build_task
from lightning_pipesync import LinearScalingLR
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.pictures import COLOURS, MARKERS, picture
from lightning_pipesync.lab.bench.tables import environment, table

#: What is done to the learning rate of a mini-batch that is k times as large: whether it is scaled, and warms up.
RULES = {"unchanged": (False, False), "linear scaling": (True, False), "linear scaling, warm-up": (True, True)}


@dataclass(frozen=True, kw_only=True)
class LargeBatches(Command):
    """Trains for as many epochs with mini-batches of several sizes: the test accuracy by what is done to the rate.

    Attributes:
        task: digits (scikit-learn's), mnist1d (digits as signals) or signals (noisy curves, with Adam), with its own
            network, optimizer and schedule.
        batch_sizes: Of the global mini-batch, as if several ranks shared it. The first is that of the task's learning
            rate.
        warmup_share: The part of the epochs in which a learning rate warms up; the paper's is 5 of 90.
        epochs: How often all samples are seen; by default as the task says.
        seeds: Each training is repeated for each of them.
        output: Folder for large_batches.json, large_batches.md and the picture.
    """

    task: str = "digits"
    batch_sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    warmup_share: float = 0.2
    epochs: int | None = None
    seeds: tuple[int, ...] = tuple(range(5))

    name = "large_batches"

    def __post_init__(self) -> None:
        self._check_all_positive("batch_sizes", self.batch_sizes, "numbers")
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share must be from 0 to 1, got {self.warmup_share!r}.")
        if self.epochs is not None:
            self._check_positive("epochs")
        if not self.seeds:
            raise ValueError("seeds must be one or more numbers.")
        if not build_task(self.task).higher_is_better:
            raise ValueError(f"task={self.task!r} has no accuracy: take digits, mnist1d or signals.")

    def results(self) -> list[dict[str, Any]]:
        """Trains.

        Returns:
            Settings, environment and ``runs``: ``batch_size``, ``rule``, ``seed``, ``steps`` and ``accuracy`` on the
            test set in %. The first batch size, which all rules leave as it is, is trained once: ``unchanged``.
        """
        first, *larger = self.batch_sizes
        kinds = [(first, "unchanged"), *product(larger, RULES)]
        task, runs = build_task(self.task), []
        with progress_bar(self.task, len(kinds) * len(self.seeds)) as advance:
            for (batch_size, rule), seed in product(kinds, self.seeds):
                steps, accuracy = self._train(task, batch_size, rule, seed)
                kind = {"batch_size": batch_size, "rule": rule, "seed": seed}
                runs.append({**kind, "steps": steps, "accuracy": round(accuracy, 3)})
                advance(f"{batch_size}, {rule}: {accuracy:.2f} %")
        return [{"settings": self.settings(), "environment": environment(), "runs": runs}]

    def _train(self, task: Task, batch_size: int, rule: str, seed: int) -> tuple[int, float]:
        """Returns the number of steps, and the accuracy on the test set in %."""
        x, y = _tensors(task.train_set)
        epochs = self.epochs or task.epochs
        num_steps = max(1, epochs * len(x) // batch_size)
        torch.manual_seed(seed)
        module = task.build_module()
        optimizer = task.optimizer(module)
        scales, warms_up = RULES[rule]
        scheduler = LinearScalingLR(
            optimizer,
            warmup_steps=round(self.warmup_share * num_steps) if warms_up else 0,
            factor=batch_size / self.batch_sizes[0] if scales else 1.0,
            scheduler=task.scheduler(optimizer, num_steps),
        )
        generator = torch.Generator().manual_seed(seed)
        order = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(epochs)])
        for samples in order.split(batch_size)[:num_steps]:  # mini-batches go on over the end of an epoch
            optimizer.zero_grad()
            task.loss(module, (x[samples], y[samples])).backward()
            optimizer.step()
            scheduler.step()
        module.eval()
        with torch.no_grad():
            score, number = task.score(module, _tensors(task.test_set))
        return num_steps, task.quality(float(score) / number)

    def report(self, results: list[dict[str, Any]]) -> str:
        [result] = results
        settings = result["settings"]
        return f"""### Large mini-batches: {settings["task"]}

Test accuracy in % after the same number of epochs (mean of {len(settings["seeds"])} trainings, 95 % confidence
interval). Linear scaling: the learning rate times the size over {settings["batch_sizes"][0]}; warm-up: in the first
{settings["warmup_share"]:.0%} of the steps.

{table_of(result)}"""

    def draw(self, results: list[dict[str, Any]]) -> None:
        draw(results[0], self.output / "large_batches.png")


def table_of(result: dict[str, Any]) -> str:
    """Returns the accuracy of each rule, by batch size."""
    rows = []
    for size in result["settings"]["batch_sizes"]:
        found = {rule: _runs(result, size, rule) for rule in RULES}
        steps = found["unchanged"][0]["steps"]
        rows.append([f"{size}", f"{steps}", *(with_interval(*_accuracy(runs)) for runs in found.values())])
    return table(["mini-batch", "steps", *RULES], rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the test error over the batch size, a curve for each rule, with the confidence interval."""
    sizes = result["settings"]["batch_sizes"]
    with picture(path, (6, 4), legend="panel") as panels:
        panel = panels[0, 0]
        for rule, color, marker in zip(RULES, COLOURS, MARKERS, strict=False):
            found = [_accuracy(_runs(result, size, rule)) for size in sizes]
            errors, intervals = [100 - mean for mean, _ in found], [interval or 0.0 for _, interval in found]
            panel.errorbar(sizes, errors, intervals, label=rule, color=color, marker=marker, capsize=3)
        panel.set(xlabel="mini-batch", ylabel="test error %", title=result["settings"]["task"], xscale="log")
        panel.set_yscale("log")
        panel.set_xticks(sizes, [f"{size}" for size in sizes])
        panel.minorticks_off()
        panel.grid(alpha=0.3)


def _runs(result: dict[str, Any], size: int, rule: str) -> list[dict[str, Any]]:
    rule = "unchanged" if size == result["settings"]["batch_sizes"][0] else rule
    return [run for run in result["runs"] if (run["batch_size"], run["rule"]) == (size, rule)]


def _accuracy(runs: Sequence[dict[str, Any]]) -> tuple[float, float | None]:
    found = [run["accuracy"] for run in runs]
    return fmean(found), interval_of(found)


def _tensors(dataset: Any) -> tuple[Tensor, Tensor]:
    x, y = dataset.tensors
    return x, y


if __name__ == "__main__":
    torch.set_num_threads(1)  # small products, whose threads would wait for each other
    sys.exit(command.main("benchmarks.large_batches:LargeBatches"))
