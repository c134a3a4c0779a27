"""What a pipeline's delayed gradients cost in quality, by method and learning rate (EA-Pipe, Section IV)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.bench.models import layered
from lightning_pipesync.bench.named_settings import parse_named
from lightning_pipesync.bench.results import environment
from lightning_pipesync.bench.tasks import Task, build_task
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

#: What can be compared. ``sgd`` is one stage after the other, which the others are measured by.
METHODS = ("sgd", "pipedream", "weight_stashing", "spectrain", "naive", "ea_pipe")
#: Tasks whose quality is the share of a test set that is classified correctly.
TASKS = ("digits",)
#: What builds a model of a task, by name.
MODELS: dict[str, Callable[[Task], nn.Module]] = {
    "resnet": lambda _: layered.resnet(),
    "vgg": lambda _: layered.vgg(),
    "cnn": lambda task: task.build_module(),
}
#: After which shares of a training the learning rate is divided by 10: 30, 60 and 90 of the paper's 100 epochs.
REDUCTIONS = (0.3, 0.6, 0.9)
#: Methods in which all stages use the same weights for a mini-batch: those of its replica.
_WITH_REPLICAS = ("pipedream", "ea_pipe")


@dataclass(frozen=True)
class PipelineSettings:
    """What is measured.

    Attributes:
        task: one of ``TASKS``.
        model: one of ``MODELS``.
        stages: N, of all methods but ``sgd``.
        methods: names of ``METHODS``, each with settings of :class:`EAPipeConfig`: ``ea_pipe:elastic_force=0.3``.
        learning_rates: to begin with.
        momentum: of SGD.
        weight_decay: of SGD.
        batch_size: samples of a mini-batch.
        seeds: of the weights and the order of the data; each method trains once for each, at each learning rate.
        epochs: of each training.
        evaluations: how often the error is measured in a training.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    task: str
    model: str
    stages: int
    methods: tuple[str, ...]
    learning_rates: tuple[float, ...]
    momentum: float
    weight_decay: float
    batch_size: int
    seeds: tuple[int, ...]
    epochs: int
    evaluations: int

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("model", tuple(MODELS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; there are {', '.join(known)}.")
        for name in ("methods", "learning_rates", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be one or more different ones, got {values!r}.")
        for name in ("stages", "batch_size", "epochs", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}.")
        for learning_rate in self.learning_rates:
            if not learning_rate > 0:
                raise ValueError(f"learning_rates must be positive, got {learning_rate!r}.")
        for name in ("momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and less than 1, got {getattr(self, name)!r}.")
        for method in self.methods:
            parse_method(method, 0)


def parse_method(text: str, seed: int) -> EAPipeConfig:
    """Returns the settings of the method that ``text`` describes: ``NAME`` or ``NAME:SETTING=VALUE,...``.

    Raises:
        ValueError: the method or a setting is unknown, or a value out of its range.
    """
    name = text.partition(":")[0]
    fixed = {"algorithm": "naive" if name == "sgd" else name, "split": "parameters", "seed": seed}
    config: EAPipeConfig = parse_named(text, dict.fromkeys(METHODS, EAPipeConfig), fixed)
    return config


def measure_pipeline(settings: PipelineSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Trains with every method at every learning rate, seed by seed.

    Returns:
        Settings, environment, and ``runs``, what :func:`train` returns.
    """
    task = build_task(settings.task)
    runs = []
    for seed in settings.seeds:
        for learning_rate in settings.learning_rates:
            for method in settings.methods:
                run = train(task, method, learning_rate, seed, settings)
                runs.append(run)
                outcome = "diverged" if run["diverged"] else f"{run['points'][-1]['error']:.2f} %"
                progress(f"{method}, learning rate {learning_rate:g}, seed {seed}: {outcome}")
    return {"settings": asdict(settings), "environment": environment(), "runs": runs}


def train(task: Task, method: str, learning_rate: float, seed: int, settings: PipelineSettings) -> dict[str, Any]:
    """Trains once, until the end or until a loss is not finite.

    Returns:
        ``method``, ``learning_rate``, ``seed``, ``seconds`` of the training, ``diverged``, and ``points``: epochs and
        test error in %, at each evaluation.
    """
    torch.manual_seed(seed)  # the same weights for every method
    model = MODELS[settings.model](task)
    assert isinstance(model, nn.Sequential)
    optimizers: list[Optimizer] = []

    def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizers.append(
            SGD(parameters, learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay)
        )
        return optimizers[-1]

    engine = build_engine(model, optimizer_of, method, seed, settings.stages)
    order = torch.Generator().manual_seed(seed)
    # A smaller last mini-batch would count as much as the others, and batch norm cannot do with a single sample.
    loader = DataLoader(task.train_set, settings.batch_size, shuffle=True, generator=order, drop_last=True)
    num_steps = settings.epochs * len(loader)
    reduced = {round(share * num_steps) for share in REDUCTIONS}
    evaluated = {round((i + 1) * num_steps / settings.evaluations) for i in range(settings.evaluations)}
    points: list[dict[str, float]] = []
    steps, diverged = 0, False
    start = time.perf_counter()
    while steps < num_steps and not diverged:
        for batch in loader:
            loss = engine.train_batch((batch[0], batch[1]))
            assert loss is not None, "all stages are here"
            diverged = not bool(loss.isfinite())
            if diverged:
                break
            steps += 1
            if steps in reduced:
                _reduce_learning_rates(optimizers)
            if steps in evaluated:
                engine.flush()
                points.append({"epoch": steps / len(loader), "error": error_of(task, model)})
    result = {"method": method, "learning_rate": learning_rate, "seed": seed, "diverged": diverged, "points": points}
    return {**result, "seconds": time.perf_counter() - start}


def build_engine(
    model: nn.Sequential,
    optimizer_of: Callable[[Iterable[nn.Parameter]], Optimizer],
    method: str,
    seed: int,
    stages: int,
) -> EAPipe:
    """Returns the pipeline of ``stages`` stages that ``method`` describes, or one that trains the same.

    Where a mini-batch has a replica in all stages, it does not matter how many there are, only how many replicas: one
    stage is faster.
    """
    config = parse_method(method, seed)
    if method.startswith("sgd"):
        stages = 1
    elif config.algorithm in _WITH_REPLICAS:
        config, stages = replace(config, replicas=config.replicas or stages), 1
    return EAPipe(model, nn.functional.cross_entropy, optimizer_of, config, virtual_stages=stages)


@torch.no_grad()
def error_of(task: Task, model: nn.Module) -> float:
    """Returns the share of the test set that is misclassified, in %."""
    model.eval()
    score = number = 0.0
    for batch in DataLoader(task.test_set, batch_size=200):
        batch_score, batch_number = task.score(model, batch)
        score, number = score + batch_score.item(), number + batch_number
    model.train()
    return 100 - task.quality(score / number)


def _reduce_learning_rates(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] /= 10
