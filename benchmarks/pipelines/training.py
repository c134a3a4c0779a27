"""Trainings of pipelines with the engine, all stages in this process, and what is chosen for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.named_settings import parse_named
from benchmarks.pipelines import layered
from benchmarks.tasks import READ_TASKS, Task, build_task, check_choice, evaluations
from lightning_pipesync.lab.bench.benchmark import Command
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig

Error = TypeVar("Error")

#: The methods. ``sgd``, without a delay, is the baseline.
METHODS = ("sgd", "pipedream", "weight_stashing", "spectrain", "naive", "ea_pipe")
#: Tasks whose quality is the accuracy on a test set; the papers' data are read from a folder.
TASKS = ("digits", "mnist1d", "cifar10", "cifar100", "imagenet")
#: Factories of the models of a task, by name; those of the papers are their tasks' own.
MODELS: dict[str, Callable[[Task], nn.Module]] = {
    "cnn": lambda task: task.build_module(),
    "mlp": lambda task: layered.mlp(task.train_set[0][0].numel()),
    "residual_mlp": lambda task: layered.residual_mlp(task.train_set[0][0].numel()),
}
#: Of dense layers alone: many of them train at once.
AT_ONCE = ("mlp", "residual_mlp")
#: The parts of a training after which the learning rate is divided by 10: 30, 60 and 90 of the paper's 100 epochs.
REDUCTIONS = (0.3, 0.6, 0.9)
#: Methods in which all stages use the same weights for a mini-batch: those of its replica.
_WITH_REPLICAS = ("pipedream", "ea_pipe")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(Command):
    """The options of the trainings of a study.

    Attributes:
        task: digits (scikit-learn's) or mnist1d (digits as signals); or the papers' cifar10, cifar100 or imagenet, with
            --data.
        data: Folder with the data set of cifar10, cifar100 or imagenet, as of python -m benchmarks.converge.
        workers: Number of processes that load samples. 0: this process loads them.
        device: cpu or cuda.
        model: mlp (8 dense layers) or residual_mlp (50), whose trainings are made many at once, some hundred times as
            fast, or cnn (the task's own, 11 layers). Of cifar10: vgg16 or resnet101; cifar100: resnet34 or vgg11;
            imagenet: resnet50 or alexnet.
        stages: Number of stages, which is the number of mini-batches in flight.
        methods: sgd (one stage), pipedream, weight_stashing, spectrain, naive or ea_pipe, each with settings if need
            be: NAME:SETTING=VALUE,SETTING=VALUE.
        learning_rates: To begin with; divided by 10 after 30, 60 and 90 % of a training.
        momentum: Of SGD, in each stage.
        weight_decay: Of SGD.
        batch_sizes: Samples of a mini-batch.
        validation: Share of the training set that chooses among learning rates, batch sizes and settings of a method,
            and is not trained on; 0 for none, and no choice.
        seeds: Each method trains once for each of these at each learning rate.
        epochs: Of each training.
        evaluations: How often the error is measured in a training, each time after the pipeline has been emptied.
    """

    task: str = "digits"
    data: str | None = None
    workers: int = 0
    device: str = "cpu"
    model: str = "mlp"
    stages: int = 8
    methods: tuple[str, ...] = ("sgd", "pipedream", "spectrain", "naive", "ea_pipe:elastic_force=0.1")
    learning_rates: tuple[float, ...] = (0.5, 0.1, 0.01)
    momentum: float = 0.0
    weight_decay: float = 5e-4
    batch_sizes: tuple[int, ...] = (16,)
    validation: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 20
    evaluations: int = 20

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("model", (self.model,) if self.is_read else tuple(MODELS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; there are {', '.join(known)}.")
        check_choice(self.task, self.data, self.model if self.is_read else None, self.workers, self.device)
        if self.device != "cpu" and self.model in AT_ONCE:
            raise ValueError(f"device={self.device!r} with model={self.model!r}: its trainings are made at once here.")
        for name in ("methods", "learning_rates", "batch_sizes", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be one or more different values, got {values!r}.")
        self._check_positive("stages", "epochs", "evaluations")
        self._check_all_positive("batch_sizes", self.batch_sizes, "numbers")
        self._check_all_positive("learning_rates", self.learning_rates, "numbers")
        for name in ("momentum", "weight_decay", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and less than 1, got {getattr(self, name)!r}.")
        for method in self.methods:
            parse_method(method, 0)

    @property
    def is_read(self) -> bool:
        """Whether the task reads its data from a folder, and has the papers' models."""
        return self.task in READ_TASKS

    def build_task(self) -> Task:
        """Returns the task with the model of the settings."""
        model = self.model if self.is_read else None
        return build_task(self.task, data=self.data, model=model, workers=self.workers, device=self.device)

    def build_model(self, task: Task) -> nn.Sequential:
        """Returns the model; its weights come from torch's global generator."""
        model = (task.build_module() if self.is_read else MODELS[self.model](task)).to(task.device)
        assert isinstance(model, nn.Sequential)
        return model


def parse_method(text: str, seed: int) -> EAPipeConfig:
    """Returns the settings of ``NAME`` or ``NAME:SETTING=VALUE,...``; ValueError if one is unknown or out of range."""
    name = text.partition(":")[0]
    fixed = {"algorithm": "naive" if name == "sgd" else name, "split": "parameters", "seed": seed}
    config: EAPipeConfig = parse_named(text, dict.fromkeys(METHODS, EAPipeConfig), fixed)
    return config


@dataclass(frozen=True)
class Data:
    """The disjoint data sets of a study."""

    train: Dataset[Any]
    validation: Dataset[Any] | None  # for choices
    test: Dataset[Any]  # for the reported errors only

    @classmethod
    def of(cls, task: Task, validation: float) -> Data:
        """Splits the training set of a task, with a fixed seed."""
        held_out, rest = (part.tolist() for part in task.divided(validation))
        if not held_out:
            return cls(task.train_set, None, task.test_set)
        return cls(Subset(task.train_set, rest), Subset(task.samples_to_test_on, held_out), task.test_set)

    def errors_of(self, error_on: Callable[[Dataset[Any]], Error]) -> dict[str, Error]:
        """Returns the results of ``error_on``: ``error`` on the test set, and ``validation`` if there is such a set."""
        found = {"error": error_on(self.test)}
        return found if self.validation is None else {**found, "validation": error_on(self.validation)}


def train(
    task: Task, method: str, learning_rate: float, batch_size: int, seed: int, settings: PipelineOptions
) -> dict[str, Any]:
    """Trains once, until the end or until a loss is not finite.

    Returns:
        ``method``, ``learning_rate``, ``batch_size``, ``seed``, ``seconds`` of the training, ``diverged``, and
        ``points``: epochs and errors in %, at each evaluation.
    """
    data = Data.of(task, settings.validation)
    torch.manual_seed(seed)  # the same weights for every method
    model = settings.build_model(task)
    optimizers: list[Optimizer] = []

    def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
        sgd = SGD(parameters, learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay)
        optimizers.append(sgd)
        return sgd

    config, stages = least_pipeline(method, seed, settings.stages)
    engine = EAPipe(model, nn.functional.cross_entropy, optimizer_of, config, virtual_stages=stages)
    order = torch.Generator().manual_seed(seed)
    # A smaller last mini-batch would have the weight of a whole one, and batch norm needs more than one sample.
    loader = DataLoader(data.train, batch_size, shuffle=True, generator=order, drop_last=True, num_workers=task.workers)
    if not len(loader):
        raise ValueError(f"batch_sizes: the {len(cast(Sized, data.train))} samples are less than one of {batch_size}.")
    num_steps = settings.epochs * len(loader)
    reduced, evaluated = reductions(num_steps), evaluations(num_steps, settings.evaluations)
    points: list[dict[str, float]] = []
    steps, diverged = 0, False
    start = time.perf_counter()
    while steps < num_steps and not diverged:
        for batch in loader:
            inputs, labels = task.batch_there(batch)
            loss = engine.train_batch((inputs, labels))
            assert loss is not None, "all stages are here"
            diverged = not bool(loss.isfinite())
            if diverged:
                break
            steps += 1
            for group in (group for each in optimizers for group in each.param_groups if steps in reduced):
                group["lr"] /= 10
            if steps in evaluated:
                engine.flush()
                points.append(
                    {"epoch": steps / len(loader), **data.errors_of(lambda part: _error_of(task, model, part))}
                )
    run = {"method": method, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
    return {**run, "diverged": diverged, "points": points, "seconds": time.perf_counter() - start}


def reductions(num_steps: int) -> set[int]:
    """Returns the steps after which the learning rate is reduced."""
    return {round(share * num_steps) for share in REDUCTIONS}


def least_pipeline(method: str, seed: int, stages: int) -> tuple[EAPipeConfig, int]:
    """Returns the settings of ``method``, and the smallest number of stages equivalent to ``stages``.

    If all stages use the same replica for a mini-batch, only the number of replicas matters, and one stage is fastest.
    """
    config = parse_method(method, seed)
    if method.startswith("sgd"):
        return config, 1
    if config.algorithm in _WITH_REPLICAS:
        return replace(config, replicas=config.replicas or stages), 1
    return config, stages


@torch.no_grad()
def _error_of(task: Task, model: nn.Module, dataset: Dataset[Any]) -> float:
    """Returns the classification error on a data set, in %; uses no random numbers of the training."""
    model.eval()
    score = number = 0.0
    for batch in DataLoader(dataset, 200, num_workers=task.workers, generator=torch.Generator()):
        batch_score, batch_number = task.score(model, task.batch_there(batch))
        score, number = score + batch_score.item(), number + batch_number
    model.train()
    return 100 - task.quality(score / number)
