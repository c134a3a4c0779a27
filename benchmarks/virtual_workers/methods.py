"""The trainings of virtual workers, by the names and settings that benchmarks give to methods."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.named_settings import parse_named
from benchmarks.tasks import Task
from benchmarks.training import config_types
from benchmarks.virtual_workers.batches import Order
from benchmarks.virtual_workers.replicas import ReplicaTraining
from benchmarks.virtual_workers.served import ServedReplicas, ServedTraining
from benchmarks.virtual_workers.training import DDPTraining, PipeSGDTraining, VirtualTraining
from lightning_pipesync.lab.bench.named_settings import split_method


def virtual_training(
    task: Task, method: str, num_workers: int, seeds: Sequence[int], num_steps: int
) -> tuple[VirtualTraining, Order]:
    """Returns trainings, one for each seed, with ``NAME`` or ``NAME:SETTING=VALUE,...``; and their data.

    Raises:
        ValueError: there is no such method or setting, or it is not simulated.
    """
    name, config = split_method(method)[0], parse_named(method, config_types())
    shape = task, config, num_workers, seeds, num_steps
    if name in ("selsync", "local_sgd"):
        order = Order(task, config, num_workers, seeds)
        return ReplicaTraining(*shape, steps_per_epoch=order.steps_per_epoch), order
    order = Order(task, None, num_workers, seeds)
    if name == "pipe_sgd":
        return PipeSGDTraining(*shape), order
    if name == "ddp":
        return DDPTraining(task, None, num_workers, seeds, num_steps), order
    if name == "parameter_server":
        served = ServedReplicas if config.policy == "diloco" else ServedTraining
        return served(*shape), order
    raise ValueError(f"{name!r} has no virtual workers; ddp, selsync, local_sgd, pipe_sgd and parameter_server do.")
