"""``python -m benchmarks.side_by_side``: what pipelines side by side learn from the same samples as a longer one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch.distributed as dist
from torch import manual_seed, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import command
from benchmarks.intervals import interval_of, with_interval
from benchmarks.pipelines.training import MODELS, Data, error_of, reductions
from benchmarks.stages import parse_candidate
from benchmarks.tasks import Task, build_task
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.named_settings import readable
from lightning_pipesync.lab.bench.tables import table
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig


@dataclass(frozen=True, kw_only=True)
class SideBySide(Benchmark):
    """Trains 8 dense layers on all ranks, in one or more pipelines: the test error after the same number of samples.

    Attributes:
        methods: What is compared, as in benchmarks.stages: ea_pipe or 1f1b:num_pipelines=2,average=elastic.
        task: digits (scikit-learn's) or mnist1d (digits as signals).
        learning_rates: Of SGD with momentum 0.9, to begin with; divided by 10 after 30, 60 and 90 % of a training.
        batch_size: Samples of a mini-batch, of each pipeline.
        epochs: How often all samples are seen, by one of the pipelines each.
        seeds: Each method trains once for each of these at each learning rate.
        output: Folder for side_by_side.json and side_by_side.md.
    """

    methods: tuple[str, ...] = ("1f1b", "1f1b:num_pipelines=2", "1f1b:num_pipelines=2,average=elastic")
    task: str = "digits"
    learning_rates: tuple[float, ...] = (0.01, 0.03)
    batch_size: int = 16
    epochs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)

    name = "side_by_side"

    def __post_init__(self) -> None:
        for method in self.methods:
            parse_candidate(method)
        self._check_positive("batch_size", "epochs")
        self._check_all_positive("learning_rates", self.learning_rates, "numbers")
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return len(self.methods) * len(self.learning_rates) * len(self.seeds)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Trains; a collective call.

        Returns:
            Settings, and ``runs``: ``method``, ``learning_rate``, ``seed`` and ``error``, of the test set in %.
        """
        task, runs = build_task(self.task), []
        for method, rate, seed in itertools.product(self.methods, self.learning_rates, self.seeds):
            error = self._train(task, replace(parse_candidate(method), seed=seed), rate)
            runs.append({"method": method, "learning_rate": rate, "seed": seed, "error": error})
            progress(method)
        return {"settings": self.settings(), "world_size": dist.get_world_size(), "runs": runs}

    def _train(self, task: Task, config: EAPipeConfig, rate: float) -> float:
        """Returns the test error in %."""
        manual_seed(config.seed)
        data, model = Data.of(task, 0.0), MODELS["mlp"](task)
        optimizers: list[Optimizer] = []

        def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
            optimizers.append(SGD(parameters, rate, momentum=0.9, weight_decay=5e-4))
            return optimizers[-1]

        engine = EAPipe(model, nn.functional.cross_entropy, make, config)
        part, parts = engine.data_part
        sampler = DistributedSampler(data.train, parts, part, seed=config.seed, drop_last=True)  # type: ignore[var-annotated]
        loader = DataLoader(data.train, self.batch_size, sampler=sampler, drop_last=True)
        reduced = reductions(self.epochs * len(loader))
        for step, batch in enumerate(_epochs(loader, sampler, self.epochs), start=1):
            engine.train_batch((batch[0], batch[1]))
            for group in (group for optimizer in optimizers for group in optimizer.param_groups if step in reduced):
                group["lr"] /= 10
        engine.gather()
        engine.detach()
        return error_of(task, model, data.test)

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(self._table(result) for result in results)

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws nothing."""

    def _table(self, result: dict[str, Any]) -> str:
        rows = []
        for method in self.methods:
            cells = []
            for rate in self.learning_rates:
                wanted = [run for run in result["runs"] if (run["method"], run["learning_rate"]) == (method, rate)]
                errors = [run["error"] for run in wanted]
                cells.append(with_interval(fmean(errors), interval_of(errors)))
            rows.append([readable(method), *cells])
        return f"""### {self.task} on {result["world_size"]} ranks

Test error in % after {self.epochs} epochs, batches of {self.batch_size} in each pipeline, by learning rate: mean of
{len(self.seeds)} trainings and 95 % confidence interval.

{table(["", *(f"{rate:g}" for rate in self.learning_rates)], rows)}"""


def _epochs(loader: DataLoader[Any], sampler: DistributedSampler[Any], number: int) -> Iterable[Any]:
    for epoch in range(number):
        sampler.set_epoch(epoch)
        yield from loader


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.side_by_side:SideBySide"))
