"""SelSync's data partitioning (SelDP): every rank sees the whole data set, starting at another chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_pipesync.data.resumable import ResumableSampler


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
