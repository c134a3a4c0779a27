"""A sampler that can start where an interrupted run has stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
