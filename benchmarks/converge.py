"""``python -m benchmarks.converge``: time, steps and bytes to a target quality, by method (SelSync, Table I).

On hosts of different speed it draws the error and the staleness as the lecture on parameter servers does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks import command, converge_report
from benchmarks.learners import host_speed_report
from benchmarks.learners.host_speed import HostSpeeds, Passes
from benchmarks.named_settings import parse_named
from benchmarks.tasks import (
    EVALUATED_ON,
    TASKS,
    Task,
    build_task,
    check_choice,
    check_data,
    evaluations,
)
from benchmarks.training import COMPARED, Training, config_types
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress, launched
from lightning_pipesync.lab.bench.named_settings import split_method

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Converge(Benchmark):
    """Trains to a target with several methods: time, steps and bytes that each needs.

    Attributes:
        task: digits or resnet_digits (scikit-learn's), mnist1d (digits as signals) or signals (noisy curves), by
            accuracy; topics or words (Python's documentation by character or by word), tiny_llama (topics with a Llama)
            or topics_muon (topics with Muon), by perplexity; or cifar10, cifar100, imagenet or wikitext, as in the
            papers, with --data.
        data: Folder with the data set of cifar10 (cifar-10-batches-py), cifar100 (cifar-100-python), imagenet (train
            and val, each with a folder per class) or wikitext (wiki.train.tokens, wiki.test.tokens). Nothing is
            downloaded.
        model: Of cifar10: resnet101 or vgg16; cifar100: vgg11 or resnet34; imagenet: alexnet or resnet50. The first is
            SelSync's, and the default, the second EA-Pipe's. Batch size, optimizer and decay are the paper's.
        workers: Number of processes of each rank that load its samples. 0: the rank loads them itself.
        device: cpu, or cuda with NCCL, where each rank has the GPU of its place in its host.
        methods: alone, ddp, ddp_powersgd (torch's own PowerSGD) and methods of this package, each with settings if need
            be: NAME:SETTING=VALUE,SETTING=VALUE, and a pair as injection=0.5:0.5. FedAvg with C and E is
            local_sgd:period=0.25epoch,participation=0.5. With alone, each rank by itself, the table has the limit.
        target: Quality to reach; the task's own if not given.
        seeds: Each method trains once for each of these.
        epochs: Of each training; the task's own if not given.
        steps: Maximum number of each training. A few are enough to time a step of each method.
        evaluations: How often the quality is measured in a training; time and bytes to the target are as fine as that.
        evaluate_on: test, or validation: a tenth of the training data, on which to choose settings.
        labels_per_worker: Number of labels that each rank holds, which makes the data non-IID.
        compute: Emulated computation: the least time of each pass of a rank, e.g. 100ms; it sleeps for the rest.
        slow: HOST:SHARE% for a rank that computes at that share of the speed (3:50%). May be given again.
        stalls: SHARE%:FACTOR for passes that stall at random (5%:10): that share of them takes longer, by an
            exponentially distributed time with a mean of so many times --compute.
    """

    task: str = "digits"
    data: str | None = None
    model: str | None = None
    workers: int = 0
    device: str = "cpu"
    methods: tuple[str, ...] = COMPARED
    target: float | None = None
    seeds: tuple[int, ...] = (0,)
    epochs: int | None = None
    steps: int | None = None
    evaluations: int = 24
    evaluate_on: str = "test"
    labels_per_worker: int | None = None
    compute: str | None = None
    slow: list[str] = field(default_factory=list)
    stalls: str | None = None

    name = "converge"

    def __post_init__(self) -> None:
        check_choice(self.task, self.data, self.model, self.workers, self.device)
        if self.evaluate_on not in EVALUATED_ON:
            raise ValueError(f"evaluate_on must be one of {', '.join(EVALUATED_ON)}, got {self.evaluate_on!r}.")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods must be one or more different values, got {self.methods!r}.")
        for method in self.methods:
            config_of(method)
        if not self.seeds:
            raise ValueError("seeds must be one or more numbers.")
        for name in ("epochs", "evaluations", "steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}.")
        if self.labels_per_worker is not None and self.task in TASKS:  # the others take a while to read
            self.build_task()
        super().__post_init__()
        for count in () if launched() else self.hosts:
            self.host_speeds.check_hosts(count)

    @property
    def num_measurements(self) -> int:
        return len(self.methods) * len(self.seeds) * self.evaluations

    def build_task(self) -> Task:
        """Returns the task with the data of the settings."""
        task = build_task(self.task, self.evaluate_on, self.data, self.model, self.workers, self.device)
        return task if self.labels_per_worker is None else task.with_label_skew(self.labels_per_worker)

    def results(self) -> list[dict[str, Any]]:
        if not launched():
            check_data(self.task, self.data)
        return super().results()

    @property
    def host_speeds(self) -> HostSpeeds:
        """How long the computation of a step takes on each host."""
        return HostSpeeds.parse(self.compute, self.slow, self.stalls)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Trains with every method, seed by seed; a collective call."""
        self.host_speeds.check_hosts(dist.get_world_size())
        task = on_all_ranks(self.build_task)
        runs = [train(task, method, seed, self, progress) for seed in self.seeds for method in self.methods]
        return {
            "settings": self.settings(),
            "world_size": dist.get_world_size(),
            "metric": f"{self.evaluate_on} {task.metric}",
            "higher_is_better": task.higher_is_better,
            "target": task.target if self.target is None else self.target,
            "runs": runs,
        }

    def report(self, results: list[dict[str, Any]]) -> str:
        tables = [converge_report.as_markdown(results)]
        if self.compute is not None:
            tables += [host_speed_report.as_markdown(result, config_of) for result in results]
        return "\n".join(tables)

    def draw(self, results: list[dict[str, Any]]) -> None:
        converge_report.draw(results, self.output / "converge.png")
        for result in results:
            host_speed_report.draw_errors(result, self.output / f"errors_{result['world_size']}.png")
            host_speed_report.draw_staleness(result, self.output / f"staleness_{result['world_size']}.png")


def on_all_ranks(function: Callable[[], T]) -> T:
    """Returns the result of ``function``; a ``ValueError`` of one rank is raised on all of them; a collective call."""
    result, problem = None, None
    try:
        result = function()
    except ValueError as error:
        problem = error
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise ValueError(f"Rank {rank} cannot train: {text}")
    return cast(T, result)


def parse_method(text: str) -> Callable[[Task], Training]:
    """Returns a factory of trainings with the method ``NAME`` or ``NAME:SETTING=VALUE,...``."""
    name, config = split_method(text)[0], config_of(text)
    return lambda task: Training(task, name, config)


def config_of(text: str) -> Any:
    """Returns the settings of the method ``NAME`` or ``NAME:SETTING=VALUE,...``; ValueError if one is wrong."""
    return parse_named(text, config_types())


def train(task: Task, method: str, seed: int, settings: Converge, progress: Callable[[str], object]) -> dict[str, Any]:
    """Trains once; a collective call.

    ``staleness`` is the mean, and ``staleness_counts`` has the numbers of gradients that were 0, 1, ... updates late.
    In a point, ``seconds`` and ``mib`` (sent by rank 0) are those of the steps, without the consolidation of the
    weights; ``spread`` is that of :func:`spread_of`, None if the ranks are not at the same step.
    """
    torch.manual_seed(seed)  # the same weights with any method
    training = parse_method(method)(task)
    torch.manual_seed(1000 * seed + dist.get_rank())
    training.run_passes = Passes(settings.host_speeds.seconds_of(dist.get_rank(), seed)).run
    # The same number of steps for every method: with data injection a step uses fewer of the rank's own samples.
    num_steps = (settings.epochs or task.epochs) * training.steps_per_epoch
    num_steps = min(num_steps, settings.steps or num_steps)
    points = []
    for point in points_of(training, seed, num_steps, settings.evaluations):
        points.append(point)
        progress(f"{method}, seed {seed}: {point['quality']:.2f}")
    result = {"method": method, "seed": seed, "lssr": training.lssr, "points": points}
    if counts := training.staleness:
        mean = sum(staleness * count for staleness, count in enumerate(counts)) / sum(counts)
        result |= {"staleness": mean, "staleness_counts": counts}
    training.close()
    return result


def points_of(training: Training, seed: int, num_steps: int, number: int) -> Iterator[dict[str, Any]]:
    """Trains, and yields as many evaluations as ``number``; a collective call."""
    if not training.own_pace:
        yield from _train_together(training, seed, num_steps, evaluations(num_steps, number))
        return
    for point, module in training.at_own_pace(seed, num_steps, number):
        without = {"spread": None, "consolidation_seconds": 0.0, "consolidation_mib": 0.0}
        yield {**point, "quality": evaluate(training.task, module), **without}


def _train_together(training: Training, seed: int, num_steps: int, evaluated: set[int]) -> Iterator[dict[str, Any]]:
    """Trains with as many steps on each rank, and yields an evaluation after some of them; a collective call."""
    batches = islice(chain.from_iterable(repeat(training.loader(seed))), num_steps)
    scheduler = training.task.scheduler(training.candidate.optimizer, num_steps)
    seconds = 0.0
    dist.barrier()
    start = time.perf_counter()
    for steps, batch in enumerate(batches, start=1):
        training.step(batch)
        scheduler.step()
        if steps in evaluated:
            own, mib, mib_beside = weights_of(training.module), training.mib_sent, training.mib_beside_steps
            dist.barrier()  # until the slowest rank has taken this step, too
            seconds += time.perf_counter() - start
            start = time.perf_counter()
            with training.consolidated() as module:
                consolidation = time.perf_counter() - start
                quality, spread = evaluate(training.task, module), spread_of(own, weights_of(module))
            point = {"steps": steps, "seconds": seconds, "mib": mib, "quality": quality}
            yield point | {
                "spread": spread,
                "consolidation_seconds": consolidation,
                "consolidation_mib": training.mib_beside_steps - mib_beside,
            }
            dist.barrier()
            start = time.perf_counter()


@torch.no_grad()
def evaluate(task: Task, module: torch.nn.Module) -> float:
    """Returns the quality on the test set, of which each rank evaluates a share; a collective call."""
    module.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share: Dataset[Any] = Subset(task.test_set, range(rank, len(cast(Sized, task.test_set)), world_size))
    total = torch.zeros(2, dtype=torch.float64)
    for batch in DataLoader(share, task.test_batch_size, num_workers=task.workers):
        score, number = task.score(module, task.batch_there(batch))
        total += torch.tensor([score.item(), number], dtype=torch.float64)
    dist.all_reduce(total)
    module.train()
    return task.quality((total[0] / total[1]).item())


def weights_of(module: torch.nn.Module) -> Tensor:
    """Returns a copy of all weights, of shape (number of values)."""
    return parameters_to_vector(module.parameters()).detach()


def spread_of(own: Tensor, consolidated: Tensor) -> float:
    """Returns the distance of the ranks' own weights from the consolidated ones; a collective call.

    It is the root mean square over the ranks, relative to the norm of the consolidated weights.
    """
    squared = (own - consolidated).double().square().sum()
    dist.all_reduce(squared)
    return (squared / dist.get_world_size()).sqrt().item() / consolidated.double().norm().item()


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.converge:Converge"))
