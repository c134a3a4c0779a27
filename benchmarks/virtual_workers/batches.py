"""Which samples each virtual worker uses in a step, by the package's own samplers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from benchmarks.tasks import Task
from benchmarks.virtual_workers.stacked_model import tensors_of
from lightning_pipesync.data.injection import DataInjection, adjusted_batch_size
from lightning_pipesync.data.order import DataSettings
from lightning_pipesync.data.samplers import LabelSkewedSampler, SelDPSampler


class Batch(NamedTuple):
    """The mini-batches of some rows, all of the same number of samples."""

    rows: Tensor
    tensors: tuple[Tensor, ...]


class Order:
    """The samples of each step of some trainings, one for each seed.

    Each worker has the batches of its sampler, epoch after epoch; what is left of an epoch and is no whole batch is not
    used. Rows are workers, those of the first seed first.

    Args:
        task: has the data.
        data: partition and injection; None: torch's order.
        num_workers: workers of a training.
        seeds: one for each training.
    """

    def __init__(self, task: Task, data: DataSettings | None, num_workers: int, seeds: Sequence[int]) -> None:
        self._tensors, self._data, self._number = tensors_of(task.train_set), data, num_workers
        self._injection = None if data is None else data.injection
        size = task.batch_size
        if self._injection is not None:
            size = adjusted_batch_size(size, *self._injection, num_workers)
            self._drawn = DataInjection(*self._injection, _Places(num_workers))
        partition = "defdp" if data is None else data.partition
        full_pass = data is not None and data.full_pass
        self._epochs = [_epochs_of(task, partition, full_pass, num_workers, seed, size) for seed in seeds]
        self.steps_per_epoch = self._epochs[0](0).shape[1]

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yields the batches of one step after the other, without an end."""
        step, epoch = 0, 0
        while True:
            of_seeds = torch.cat([indices_of(epoch) for indices_of in self._epochs])  # [rows, steps, samples]
            for indices in of_seeds.unbind(dim=1):
                yield [Batch(rows, self._samples(chosen)) for rows, chosen in self._injected(indices, step)]
                step += 1
            epoch += 1

    def _samples(self, indices: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self._tensors)

    def _injected(self, indices: Tensor, step: int) -> list[tuple[Tensor, Tensor]]:
        """Returns rows and what they use, ``[rows, samples]``: with injection what others share is appended."""
        everyone = torch.arange(len(indices))
        if self._injection is None:
            return [(everyone, indices)]
        sharing = self._drawn.sharing_ranks(step)
        shared = indices.view(-1, self._number, indices.shape[1])[
            ..., : max(1, round(self._injection[1] * indices.shape[1]))
        ]
        groups: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for row in everyone.tolist():
            training, worker = divmod(row, self._number)
            others = [shared[training, other] for other in sharing if other != worker]
            chosen = torch.cat([indices[row], *others])
            groups.setdefault(len(chosen), []).append((everyone[row], chosen))
        return [tuple(map(torch.stack, zip(*group, strict=True))) for group in groups.values()]  # type: ignore[misc]


class _Places:
    """What data injection asks a transport when nothing is sent."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size

    def send(self, *_: Any) -> Any:
        raise NotImplementedError

    recv = send


def _epochs_of(task: Task, partition: str, full_pass: bool, num_workers: int, seed: int, batch_size: int) -> Any:
    """Returns a function that returns the samples of an epoch, ``[workers, steps, samples]``."""
    ranks = range(num_workers)
    samplers: list[DistributedSampler[Any]]
    if partition == "seldp":
        samplers = [SelDPSampler(task.train_set, num_workers, rank, seed=seed, full_pass=full_pass) for rank in ranks]
    elif task.labels is not None and task.labels_per_worker is not None:
        skew = task.labels, task.labels_per_worker, num_workers
        samplers = [LabelSkewedSampler(*skew, rank, seed=seed) for rank in ranks]
    else:
        samplers = [DistributedSampler(task.train_set, num_workers, rank, seed=seed) for rank in ranks]
    steps = len(samplers[0]) // batch_size
    if not steps:
        raise ValueError(f"A worker has {len(samplers[0])} samples in an epoch, no batch of {batch_size}.")
    used = steps * batch_size
    for sampler in samplers:
        if isinstance(sampler, SelDPSampler):
            sampler.samples_per_epoch = used

    def indices_of(epoch: int) -> Tensor:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        found = torch.tensor([list(sampler)[:used] for sampler in samplers])
        return found.view(num_workers, steps, batch_size)

    return indices_of
