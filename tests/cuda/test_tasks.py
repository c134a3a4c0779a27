"""Trainings of tasks on a GPU: the weights and the batches are there, and all ranks measure the same quality."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.converge import Converge, parse_method, train
from benchmarks.pipeline import Pipeline
from benchmarks.pipelines.training import train as train_pipeline
from benchmarks.tasks import build_task
from tests.cuda.device import launch_on_device, needs_cuda

pytestmark = needs_cuda
METHODS = ("ddp", "selsync:delta=0.3", "parameter_server:policy=async")


def trainings() -> dict[str, tuple[list[dict[str, Any]], str]]:
    """The points of a training with each method, and the type of the device of its weights."""
    task, settings = build_task("digits", device="cuda"), Converge(methods=METHODS, epochs=1, evaluations=2)
    found = {}
    for method in METHODS:
        points = train(task, method, 0, settings, lambda text: None)["points"]
        training = parse_method(method)(task)
        found[method] = points, next(training.module.parameters()).device.type
        training.close()
    dist.barrier()
    return found


def test_tasks_are_trained_on_the_device() -> None:
    for first, second in zip(*(found.values() for found in launch_on_device(trainings, 2)), strict=True):
        assert [point["quality"] for point in first[0]] == [point["quality"] for point in second[0]]
        assert first[0][-1]["quality"] > 15, "better than by chance, after an epoch"
        assert (first[1], second[1]) == ("cuda", "cuda")


def test_pipelines_are_trained_on_the_device() -> None:
    options = Pipeline(model="vgg", stages=2, device="cuda", epochs=1, evaluations=1, batch_sizes=(50,))
    run = train_pipeline(options.build_task(), "ea_pipe:elastic_force=0.3", 0.1, 50, 0, options)
    assert not run["diverged"]
    assert next(options.build_model(options.build_task()).parameters()).device == torch.device("cuda", 0)
