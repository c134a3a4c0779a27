"""Label-skewed (non-IID) partition of a classification data set, with a few labels per worker."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_pipesync.data.resumable import ResumableSampler


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
