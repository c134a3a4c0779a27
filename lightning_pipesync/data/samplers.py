"""Samplers that can start within an epoch: torch's order, SelDP, and parts of a data set with a few labels each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler


class ResumableSampler(DistributedSampler[int]):
    """``DistributedSampler`` that can start within an epoch.

    Args:
        dataset: Map-style data set with a length, which must not change.
        num_replicas: Number of ranks; taken from the default process group if None.
        rank: This rank, from 0 to ``num_replicas - 1``; taken from the default process group if None.
        shuffle: Whether to shuffle the data set, anew in every epoch.
        seed: Seed of the shuffle; must be equal on all ranks.
        drop_last: Whether to drop the last samples if they cannot be divided evenly.
        start: ``(epoch, samples)`` where a resumed run starts: the epoch, and the number of its samples to skip. They
            are skipped once: a second iteration over the epoch is whole. If there are more of them than an epoch has,
            the epoch had several iterations, as with a ``CombinedLoader`` that cycles its shorter loaders: the first
            iteration is empty, and the next one skips the remainder. ``len()`` stays that of a whole epoch.

    Attributes:
        on_skip: called before the first sample is fetched, if the first iteration skips samples.

    Raises:
        ValueError: If ``rank`` or ``start`` is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        if min(start) < 0:
            raise ValueError(f"start={start} is out of range: epoch and number of samples must be at least 0.")
        self.start = start
        self.on_skip: Callable[[], object] = lambda: None
        self.set_epoch(start[0])

    def __iter__(self) -> Iterator[int]:
        """Iterates over this rank's indices of the current epoch, see ``set_epoch``."""
        return iter(list(super().__iter__())[self._take_start() :])

    def _take_start(self) -> int:
        """Returns the number of samples that this iteration skips, and sets ``start`` for the next one."""
        epoch, samples = self.start
        if self.epoch != epoch:
            return 0
        self.start = (epoch, samples % len(self) if samples >= len(self) else 0)
        if samples:
            self.on_skip()
        return min(samples, len(self))


class SelDPSampler(ResumableSampler):
    """Gives every rank the whole data set as a circular queue of chunks, starting at chunk ``rank`` (SelSync III-D).

    The data set is shuffled once and split into ``num_replicas`` chunks of equal length. Rank r takes chunks r, r+1,
    ... modulo ``num_replicas`` (SelSync Fig. 7b). So no two ranks have the same chunk in the same epoch, and after
    ``num_replicas`` epochs each rank has seen the whole data set. The number of samples and of steps is that of
    ``DistributedSampler``.

    Not guaranteed: a new order in every epoch. ``seed`` fixes the order within a chunk for the whole run, and an epoch
    has new samples only because the queue has advanced. Without ``drop_last`` the last chunk is padded with the first
    samples of the shuffled data set if the lengths do not divide.

    Further arguments are those of :class:`ResumableSampler`.

    Args:
        shuffle: Whether to shuffle the data set, once; otherwise the chunks are in the data set's order.
        drop_last: Whether chunks have floor(len/N) samples, dropping the rest, instead of ceil(len/N).
        full_pass: Whether an epoch is the whole queue (N chunks) instead of one chunk. Every epoch then has the same
            order.
        samples_per_epoch: The number of samples of an epoch that are used, if the loader stops before its end
            (``drop_last``, a limit on the number of batches). The next epoch continues there, so that all samples are
            used.

    Raises:
        ValueError: If ``dataset`` holds fewer samples than there are ranks, or ``rank``, ``samples_per_epoch`` or
            ``start`` is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        full_pass: bool = False,
        samples_per_epoch: int | None = None,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last, start)
        self._dataset_size = len(dataset)  # type: ignore[arg-type]
        if self._dataset_size < self.num_replicas:
            raise ValueError(
                f"SelDP cuts the data set into one chunk a rank, but {self._dataset_size} samples are too few for "
                f"num_replicas={self.num_replicas}. Use more data or fewer ranks."
            )
        self.full_pass = full_pass
        self.samples_per_epoch = len(self) if samples_per_epoch is None else samples_per_epoch
        if not 1 <= self.samples_per_epoch <= len(self):
            raise ValueError(
                f"samples_per_epoch={samples_per_epoch} is out of range: an epoch has from 1 to {len(self)} samples."
            )
        self._order: Tensor | None = None

    def __len__(self) -> int:
        """Returns the number of samples in an epoch; ``start`` does not change it."""
        return self.total_size if self.full_pass else self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Iterates over the indices of the current epoch, see ``set_epoch``."""
        head = self.rank * self.num_samples + self.epoch * self.samples_per_epoch
        positions = head + torch.arange(self._take_start(), len(self))
        # The first modulo makes the queue circular; the second maps the padding to the first samples.
        positions = positions % self.total_size % self._dataset_size
        return iter(self._shuffled()[positions].tolist())

    def _shuffled(self) -> Tensor:
        """Returns the order of the data set as indices, drawn on first use."""
        if self._order is None:
            generator = torch.Generator().manual_seed(self.seed)
            size = self._dataset_size
            self._order = torch.randperm(size, generator=generator) if self.shuffle else torch.arange(size)
        return self._order


def label_skewed_partition(
    labels: Tensor | Sequence[int], num_replicas: int, labels_per_worker: int, seed: int = 0
) -> list[Tensor]:
    """Splits a data set so that each worker holds only ``labels_per_worker`` labels (SelSync IV-A).

    With k labels per worker and L distinct labels in sorted order, worker r holds labels r*k to r*k + k - 1 modulo L.
    The samples of a label that several workers hold are split evenly among them, at random: their numbers differ by one
    at most. The samples of a label that no worker holds are not used, with a warning.

    Args:
        labels: The label of each sample, of shape ``(num_samples,)``.
        num_replicas: Number of workers.
        labels_per_worker: Number of labels k that each worker holds, from 1 to L.
        seed: Seed of the split; must be equal on all ranks.

    Returns:
        The sample indices of each worker, ascending and disjoint: ``num_replicas`` int64 tensors of shape
        ``(part_size,)``.

    Raises:
        ValueError: If ``labels`` is not one-dimensional, ``num_replicas`` or ``labels_per_worker`` is out of range, or
            a worker would get no samples.
    """
    labels = torch.as_tensor(labels)
    if labels.dim() != 1:
        raise ValueError(f"labels must have one dimension, one label a sample, but have shape {tuple(labels.shape)}.")
    if num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas} must be at least 1.")
    distinct, label_ids, counts = labels.unique(return_inverse=True, return_counts=True)
    num_labels = len(distinct)
    if not 1 <= labels_per_worker <= num_labels:
        raise ValueError(f"labels_per_worker={labels_per_worker} must be from 1 to the number of labels, {num_labels}.")
    if num_replicas * labels_per_worker < num_labels:
        warnings.warn(
            f"labels_per_worker={labels_per_worker} on num_replicas={num_replicas} leaves "
            f"{num_labels - num_replicas * labels_per_worker} of {num_labels} labels out of training.",
            stacklevel=2,
        )

    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    grouped = shuffled[label_ids[shuffled].argsort(stable=True)]
    shares: list[list[Tensor]] = [[] for _ in range(num_replicas)]
    for label, samples in enumerate(grouped.split(counts.tolist())):
        holders = [r for r in range(num_replicas) if (label - r * labels_per_worker) % num_labels < labels_per_worker]
        if holders:
            for rank, share in zip(holders, samples.tensor_split(len(holders)), strict=True):
                shares[rank].append(share)

    parts = [torch.cat(share).sort().values for share in shares]
    for rank, part in enumerate(parts):
        if len(part) == 0:
            raise ValueError(
                f"labels_per_worker={labels_per_worker} on num_replicas={num_replicas} leaves worker {rank} without "
                "samples, because its labels have fewer samples than workers that hold them. Use more labels a worker "
                "or fewer workers."
            )
    return parts


class LabelSkewedSampler(ResumableSampler):
    """Iterates over the rank's part of a label-skewed partition, reshuffled in every epoch (SelSync IV-A).

    All ranks have the length of the largest part, so that all take the same number of steps; ranks with a shorter part
    begin it anew and see some samples more than once in an epoch.

    Further arguments are those of :class:`ResumableSampler`; ``seed`` is also that of the partition.

    Args:
        labels: The label of each sample, of shape ``(num_samples,)``; also fixes the size of the data set.
        labels_per_worker: Number of labels that each rank holds.
        shuffle: Whether to shuffle the part in every epoch; otherwise it is iterated in the data set's order.

    Raises:
        ValueError: If ``rank`` is out of range, or as ``label_skewed_partition`` does.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        labels_per_worker: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(labels, num_replicas, rank, shuffle, seed)  # type: ignore[arg-type]
        parts = label_skewed_partition(labels, self.num_replicas, labels_per_worker, seed)
        self.labels_per_worker = labels_per_worker
        self.num_samples = max(len(part) for part in parts)
        self.total_size = self.num_samples * self.num_replicas
        self._part = parts[self.rank]

    def __iter__(self) -> Iterator[int]:
        """Iterates over ``len(self)`` indices of the rank's part in the current epoch's order, see ``set_epoch``."""
        part = self._part
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            part = part[torch.randperm(len(part), generator=generator)]
        return iter(part[torch.arange(self._take_start(), self.num_samples) % len(part)].tolist())
