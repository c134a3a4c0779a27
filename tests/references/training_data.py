"""Sections III-D and III-E of the SelSync paper and Eq. 3 in one process: which samples each worker trains on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import chain

import torch


def shuffled(num_samples: int, seed: int) -> list[int]:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


def queues(num_samples: int, world_size: int, epoch: int, partition: str, full_pass: bool) -> list[list[int]]:
    """The samples of each worker in an epoch, one after the other; every worker gets as many (III-D)."""
    if partition == "defdp":  # Fig. 7a, as torch's DistributedSampler has it: dealt out in turns, anew in every epoch
        dealt = shuffled(num_samples, epoch)
        return [dealt[n::world_size] for n in range(world_size)]
    size = num_samples // world_size  # Fig. 7b
    once = shuffled(num_samples, 0)
    chunks = [once[i : i + size] for i in range(0, num_samples, size)]
    rotated = [chunks[n:] + chunks[:n] for n in range(world_size)]  # the head of worker n's queue is its own chunk
    return [list(chain(*queue)) if full_pass else queue[epoch % world_size] for queue in rotated]


def inject(batches: list[list[int]], alpha: float, beta: float, step: int) -> list[list[int]]:
    """A random alpha of the workers share beta of their batch with all others (III-E)."""
    world_size = len(batches)
    sharing = sorted(random.Random(f"0 {step}").sample(range(world_size), math.ceil(alpha * world_size)))
    shared = {n: batches[n][: max(1, round(beta * len(batches[n])))] for n in sharing}
    return [[*own, *chain(*(shared[m] for m in sharing if m != n))] for n, own in enumerate(batches)]


def training_batches(
    num_samples: int,
    world_size: int,
    epochs: int,
    batch_size: int,
    partition: str = "seldp",
    full_pass: bool = False,
    injection: tuple[float, float] | None = None,
) -> Iterator[list[list[int]]]:
    """The samples that each worker trains on, step by step."""
    if injection is not None:
        alpha, beta = injection
        batch_size = round(batch_size / (1 + alpha * beta * world_size))  # Eq. 3
    step = 0
    for epoch in range(epochs):
        of_workers = queues(num_samples, world_size, epoch, partition, full_pass)
        for i in range(0, len(of_workers[0]), batch_size):
            batches = [queue[i : i + batch_size] for queue in of_workers]
            yield batches if injection is None else inject(batches, *injection, step)
            step += 1
