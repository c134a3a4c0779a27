"""An epoch's mini-batches, handed out one by one to whichever rank asks next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

#: Returns the number of the next mini-batch of an epoch with so many, or None when there is no more.
Ask = Callable[[int, int], "int | None"]


class HandedOutBatches(Sampler[list[int]]):
    """A batch sampler whose epoch is the whole data set, whoever trains on which part of it.

    It has no length: how many batches a rank gets depends on its speed. Worker processes of a loader ask ahead.

    Args:
        dataset: the data set.
        batch_size: the number of samples in a batch.
        shuffle: whether the order of the samples is another one in each epoch.
        seed: of the order, the same on all ranks.
        drop_last: whether the last batch is left out if it is smaller.
        ask: asks for a batch.
    """

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, seed: int, drop_last: bool, ask: Ask) -> None:
        self._dataset: Sized = dataset
        self.batch_size, self.drop_last = batch_size, drop_last
        self._shuffle, self._seed, self._ask, self._epoch = shuffle, seed, ask, 0

    @property
    def num_batches(self) -> int:
        """The number of batches of an epoch, of all ranks together."""
        num_samples = len(self._dataset)
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, num_samples = self._epoch, len(self._dataset)
        order = list(range(num_samples))
        if self._shuffle:
            order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(self._seed + epoch)).tolist()
        while (number := self._ask(epoch, self.num_batches)) is not None:
            yield order[number * self.batch_size : (number + 1) * self.batch_size]


class BatchQueue:
    """Which mini-batches have been handed out, on the rank that does so."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # by epoch

    def take(self, epoch: int, num_batches: int) -> int | None:
        """Returns the number of the next mini-batch of an epoch with so many; None when there is no more."""
        number = self._next.get(epoch, 0)
        if number >= num_batches:
            return None
        self._next[epoch] = number + 1
        return number

    def state_dict(self) -> dict[int, int]:
        """Returns the number of mini-batches that were handed out, by epoch; of the last two epochs."""
        return {epoch: self._next[epoch] for epoch in sorted(self._next)[-2:]}

    def load_state_dict(self, state: dict[int, int]) -> None:
        """Resumes from what :meth:`state_dict` returned."""
        self._next = dict(state)
