"""``python -m benchmarks.quality``: what each method costs or gains in quality, with 4 to 64 workers, in one process.

The workers are virtual (:mod:`benchmarks.virtual_workers`), so that trainings have as many steps as they need to
converge. DDP trains beside each method with the same samples and hyper-parameters, from the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice, product
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import command, quality_report
from benchmarks.tasks import Task, evaluations
from benchmarks.virtual_workers.methods import virtual_training
from benchmarks.virtual_workers.stacked_model import tensors_of
from benchmarks.virtual_workers.tasks import OPTIMIZERS, RATES, TASKS, build
from benchmarks.virtual_workers.training import VirtualTraining
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.tables import environment

#: Steps of a training with one worker; with more they fall with the root of their number.
STEPS = 5000

METHODS = (
    *("ddp", "selsync", "local_sgd", "local_sgd:period=16", "local_sgd:period=16,follow_lr=false"),
    *("local_sgd:outer_optimizer=elastic", "local_sgd:neighbors=ring,period=1", "local_sgd:compression=int4"),
    *("diloco:period=16", "sparseloco:period=16", "pipe_sgd", "pipe_sgd:staleness=2", "pipe_sgd:compression=int8"),
)


class Case(NamedTuple):
    """Trainings of a task with a method, one for each seed."""

    task: str
    optimizer: str
    workers: int
    method: str


@dataclass(frozen=True, kw_only=True)
class Quality(Command):
    """Trains small models until they converge, with many virtual workers: the difference of each method to DDP.

    Attributes:
        tasks: mnist1d, digits (with augmentation), resnet (a narrow one, with BatchNorm) or topics (text).
        optimizers: sgd, with momentum and a rate that falls by steps; or adamw, with a cosine.
        workers: The numbers of workers.
        methods: ddp and others, each with settings if need be: NAME:SETTING=VALUE,SETTING=VALUE.
        seeds: Of the trainings; those of a case train together.
        steps: Of a training with one worker; with N workers the root of N less.
        rate: The learning rate; that which was best for DDP on the validation set if not given.
        evaluations: How often the quality is measured.
        evaluate_on: test, or validation: a tenth of the training data, on which to choose settings.
        processes: How many train at once.
        output: Folder for quality.json, quality.md and the picture.
    """

    tasks: tuple[str, ...] = ("mnist1d", "digits")
    optimizers: tuple[str, ...] = OPTIMIZERS
    workers: tuple[int, ...] = (4, 16, 64)
    methods: tuple[str, ...] = METHODS
    seeds: tuple[int, ...] = tuple(range(5))
    steps: int = STEPS
    rate: float | None = None
    evaluations: int = 20
    evaluate_on: str = "test"
    processes: int = 2

    name = "quality"

    def __post_init__(self) -> None:
        self._check_positive("steps", "evaluations", "processes")
        self._check_all_positive("workers", self.workers, "numbers")
        for name, given, known in (("tasks", self.tasks, TASKS), ("optimizers", self.optimizers, OPTIMIZERS)):
            if unknown := [one for one in given if one not in known]:
                raise ValueError(f"{name}: {unknown[0]!r} is not known; there are {', '.join(known)}.")
        for task, optimizer, workers, _ in self.cases if self.rate is None else ():
            if workers not in RATES.get((task, optimizer), {}):
                raise ValueError(
                    f"rate: none has been chosen for {task} with {optimizer} and {workers} workers: give one."
                )
        if not self.seeds or self.evaluate_on not in ("test", "validation"):
            raise ValueError("seeds must be one or more numbers, and evaluate_on test or validation.")

    @property
    def cases(self) -> list[Case]:
        return [Case(*values) for values in product(self.tasks, self.optimizers, self.workers, self.methods)]

    def results(self) -> list[dict[str, Any]]:
        """Trains, case by case.

        Returns:
            Settings, environment and ``trainings``: what :meth:`train` returns for each case.
        """
        found: dict[Case, dict[str, Any]] = {}
        with (
            progress_bar("virtual workers", len(self.cases)) as advance,
            ProcessPoolExecutor(self.processes, get_context("spawn")) as pool,
        ):
            running = {pool.submit(self.train, case): case for case in self.cases}
            for done in as_completed(running):
                found[running[done]] = done.result()
                advance(" ".join(map(str, running[done])))
        trainings = [found[case] for case in self.cases]
        return [{"settings": self.settings(), "environment": environment(), "trainings": trainings}]

    def train(self, case: Case) -> dict[str, Any]:
        """Trains once for each seed, all at once.

        Returns:
            The case; ``steps``, at which the quality was measured, ``quality``: by step, of each seed; ``lssr``, and
            ``rate``, the learning rate.
        """
        torch.set_num_threads(1)  # other processes have the others
        torch.backends.mha.set_fastpath_enabled(False)  # which torch.func runs row by row
        rate = self.rate or RATES[case.task, case.optimizer][case.workers]
        task = build(case.task, case.optimizer, rate, on_validation=self.evaluate_on == "validation")
        num_steps = round(self.steps / case.workers**0.5)
        training, order = virtual_training(task, case.method, case.workers, self.seeds, num_steps)
        measured, found = sorted(evaluations(num_steps, self.evaluations)), []
        evaluate = evaluator(task)
        for step, batches in enumerate(islice(order, num_steps), start=1):
            training.step(batches)
            if step in measured:
                found.append(evaluate(training))
        return {
            **case._asdict(),
            "rate": rate,
            "metric": task.metric,
            "higher_is_better": task.higher_is_better,
            "lssr": sum(training.lssr) / len(self.seeds),
            "steps": measured,
            "quality": found,
        }

    def report(self, results: list[dict[str, Any]]) -> str:
        return quality_report.as_markdown(results[0]["trainings"])

    def draw(self, results: list[dict[str, Any]]) -> None:
        quality_report.draw(results[0]["trainings"], self.output / "quality.png")


def evaluator(task: Task) -> Callable[[VirtualTraining], list[float]]:
    """Returns what measures the quality of the consolidated weights of each training."""
    test = tensors_of(task.test_set)
    parts: list[tuple[Tensor, ...]] = [*zip(*(tensor.split(500) for tensor in test), strict=True)]

    def evaluate(training: VirtualTraining) -> list[float]:
        weights, buffers = training.consolidated()
        scores = [training.model.scores(weights, buffers, part) for part in parts]
        totals, number = sum(total for total, _ in scores), sum(number for _, number in scores)
        return [round(task.quality(float(total) / number), 4) for total in totals]  # type: ignore[union-attr]

    return evaluate


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.quality:Quality"))
