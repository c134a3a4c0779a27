"""Trainings of pipelines of dense layers, many in one batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.pipelines.layered import Residual
from benchmarks.pipelines.training import (
    Data,
    PipelineOptions,
    least_pipeline,
    reductions,
)
from benchmarks.pipelines.vectorized import Dense, Trainings, trainings_of
from benchmarks.tasks import Task, evaluations
from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.split import SequentialSplit

#: One training: method, learning rate, seed.
Member = tuple[str, float, int]
#: Maximum number of models that are computed at once, in one batch of trainings.
MOST_MODELS = 240


def train_at_once(task: Task, settings: PipelineOptions) -> Iterator[dict[str, Any]]:
    """Trains with many models at once; yields the results of :func:`~.pipelines.training.train`, in another order.

    EA-Pipe trains whole rounds: mini-batches after the last round are skipped, and the learning rate is reduced between
    rounds. The pipelines are not flushed for an evaluation, unlike the engine's, where a flush shortens the delay of
    weight stashing, SpecTrain and naive pipelining.
    """
    torch.set_flush_denormal(True)  # the momentum of dead units becomes denormal
    torch.set_num_threads(1)  # the products are too small for several, which would wait for each other
    try:
        yield from _train_in_batches(task, settings)
    finally:
        torch.set_flush_denormal(False)


def _train_in_batches(task: Task, settings: PipelineOptions) -> Iterator[dict[str, Any]]:
    for batch_size in settings.batch_sizes:
        for key in dict.fromkeys(_batch_key(method, settings) for method in settings.methods):
            methods = [method for method in settings.methods if _batch_key(method, settings) == key]
            members = list(itertools.product(methods, settings.learning_rates, settings.seeds))
            name, in_flight, _ = key
            at_once = in_flight if name == "ea_pipe" else 1
            most = max(1, MOST_MODELS // at_once)
            for start in range(0, len(members), most):
                yield from _train(task, members[start : start + most], batch_size, settings)


def _batch_key(method: str, settings: PipelineOptions) -> tuple[str, int, float | None]:
    """Returns the key of methods that can train in one batch: name, mini-batches in flight and smoothing."""
    config, stages = least_pipeline(method, 0, settings.stages)
    return method.partition(":")[0], config.replicas or stages, config.prediction_smoothing


def _train(task: Task, members: list[Member], batch_size: int, settings: PipelineOptions) -> Iterator[dict[str, Any]]:
    start = time.perf_counter()
    data = Data.of(task, settings.validation)
    x, y = _tensors(data.train)
    trainings = _trainings(task, members, settings)
    rates, at_once = trainings.learning_rates, trainings.num_at_once
    orders = {seed: _order(len(x), batch_size, settings.epochs, seed) for _, _, seed in members}
    order = torch.stack([orders[seed] for _, _, seed in members], dim=1)
    per_epoch, num_steps = len(order) // settings.epochs, len(order) // at_once * at_once
    reduced, evaluated = reductions(num_steps), evaluations(num_steps, settings.evaluations)
    points: list[list[dict[str, float]]] = [[] for _ in members]
    finite = torch.ones(len(members), dtype=torch.bool)
    for first in range(0, num_steps, at_once):
        now = order[first : first + at_once]
        trainings.step(x[now], y[now])
        done = range(first + 1, first + at_once + 1)
        if not reduced.isdisjoint(done):
            rates /= 10
        if not evaluated.isdisjoint(done):
            finite &= trainings.master.isfinite().all(dim=1)
            errors = data.errors_of(lambda part: _errors(trainings, part))
            for i in finite.nonzero().flatten().tolist():
                points[i].append({"epoch": done[-1] / per_epoch, **{name: error[i] for name, error in errors.items()}})
    seconds = (time.perf_counter() - start) / len(members)
    for i, (method, learning_rate, seed) in enumerate(members):
        run = {"method": method, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed}
        yield {**run, "diverged": not bool(finite[i]), "points": points[i], "seconds": seconds}


def _trainings(task: Task, members: list[Member], settings: PipelineOptions) -> Trainings:
    """Returns the trainings, with the same initial weights as in the engine."""
    models: dict[int, nn.Sequential] = {}
    for _, _, seed in members:
        torch.manual_seed(seed)
        models.setdefault(seed, settings.build_model(task))
    model = models[members[0][2]]
    initial = torch.stack([parameters_to_vector(models[seed].parameters()).detach() for _, _, seed in members])
    rates = torch.tensor([[rate] for _, rate, _ in members])
    pipelines = [least_pipeline(method, seed, settings.stages) for method, _, seed in members]
    configs, num_stages = [config for config, _ in pipelines], pipelines[0][1]
    return trainings_of(configs, _dense(model, num_stages), initial, rates, settings.momentum, settings.weight_decay)


def _dense(model: nn.Sequential, num_stages: int) -> Dense:
    """Returns the dense layers of ``model``, in the same stages as in the engine."""
    cuts = SequentialSplit(model, EAPipeConfig(split="parameters"), num_stages, torch.device("cpu")).choose(None)
    dense = [module for module in model.modules() if isinstance(module, nn.Linear)]  # one per layer
    widths = [dense[0].in_features, *(layer.out_features for layer in dense)]
    residual = [i for i, layer in enumerate(model) if isinstance(layer, Residual)]
    return Dense(widths, [sum(cut <= i for cut in cuts) for i in range(len(dense))], residual)


def _tensors(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Returns inputs ``[samples, inputs]`` and labels of a data set."""
    x, y = next(iter(DataLoader(dataset, batch_size=len(dataset))))  # type: ignore[arg-type]
    return x.flatten(1), y


@cache
def _order(num_samples: int, batch_size: int, epochs: int, seed: int) -> Tensor:
    """Returns the samples of each mini-batch, ``[mini-batches, batch_size]``, in the order of the engine's loader."""
    order = torch.Generator().manual_seed(seed)
    samples = TensorDataset(torch.arange(num_samples))
    loader = DataLoader(samples, batch_size, shuffle=True, generator=order, drop_last=True)
    return torch.stack([batch for _ in range(epochs) for [batch] in loader])


def _errors(trainings: Trainings, dataset: Dataset[Any]) -> list[float]:
    """Returns the classification error of each training's master on a data set, in %."""
    x, y = _tensors(dataset)
    *_, output = trainings.model.forward(trainings.master, x.expand(len(trainings.master), *x.shape).contiguous())
    return (100 * (output.argmax(dim=2) != y).float().mean(dim=1)).tolist()
