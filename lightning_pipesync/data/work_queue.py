"""A queue of an epoch's mini-batches, from which each rank takes its next one when it is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

#: Returns the number of a loader's next mini-batch of an epoch with so many, or None when there is no more; the last
#: argument is whether each rank is to get one.
Ask = Callable[[int, int, int, bool], "int | None"]
#: The number of a loader, and of an epoch.
LoaderEpoch = tuple[int, int]


class WorkQueueBatches(Sampler[list[int]]):
    """A batch sampler whose epoch is the whole data set, whoever trains on which part of it.

    It has no length: how many batches a rank gets depends on its speed. Worker processes of a loader ask ahead.
    ``seed`` and ``loader``, its number, are the same on all ranks. ``to_each``: each rank is to get at least one batch
    of an epoch.

    Attributes:
        num_taken: number of batches that have been handed out to all ranks, in all epochs, when this rank asked last.
        max_batches: maximum number of batches that are handed out to all ranks, in all epochs; None: any number.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        ask: Ask,
        loader: int,
        to_each: bool,
    ) -> None:
        self._dataset: Sized = dataset
        self.batch_size, self.drop_last = batch_size, drop_last
        self._shuffle, self._seed, self.ask, self._epoch = shuffle, seed, ask, 0
        self._loader, self._to_each = loader, to_each
        self.num_taken = 0
        self.max_batches: int | None = None

    @property
    def sampler(self) -> WorkQueueBatches:
        """This object itself: frameworks set the epoch of a batch sampler's sampler."""
        return self

    @property
    def num_batches(self) -> int:
        """The number of batches of an epoch, of all ranks together."""
        num_samples = len(self._dataset)
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, num_samples, num_batches = self._epoch, len(self._dataset), self.num_batches
        if self.max_batches is not None:
            num_batches = min(num_batches, max(0, self.max_batches - epoch * num_batches))
        order = list(range(num_samples))
        if self._shuffle:
            order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(self._seed + epoch)).tolist()
        while (number := self.ask(self._loader, epoch, num_batches, self._to_each)) is not None:
            self.num_taken = epoch * self.num_batches + number + 1
            yield order[number * self.batch_size : (number + 1) * self.batch_size]
        self.num_taken = epoch * self.num_batches + num_batches


class WorkQueue:
    """Which mini-batches have been handed out, on the rank that does so, to the ``ranks`` that train."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = set(ranks)
        self._next: dict[LoaderEpoch, int] = {}
        self._had: dict[LoaderEpoch, set[int]] = {}  # the ranks that have had one
        self._last: dict[int, int] = {}  # by loader that no rank has asked for since it resumed, its last epoch before

    def problem_of_resumption(self, epoch: LoaderEpoch, num_batches: int) -> str | None:
        """Returns what to warn of before a loader's first batch after it has resumed: it begins where it has been."""
        loader, number = epoch
        last = self._last.pop(loader, -1)
        if number > last or (number == last and self._next[epoch] < num_batches):
            return None
        return (
            f"Training loader {loader} begins with epoch {number} after a checkpoint where the work queue has handed "
            f"out its batches until epoch {last}: the last of these epochs have none now. Load the state_dict() of the "
            "loader that prepare_train_loader() has returned, too, or call its set_epoch() with the epoch to train on."
        )

    def take(self, rank: int, epoch: LoaderEpoch, num_batches: int, to_each: bool) -> int | None:
        """Returns the number of the next of ``num_batches`` mini-batches for a rank; None if none is left for it.

        With ``to_each``, the last ones are kept for ranks that have had none.
        """
        if rank not in self._ranks:
            return None
        number, had = self._next.get(epoch, 0), self._had.setdefault(epoch, set())
        kept = len(self._ranks - had - {rank}) if to_each else 0
        if num_batches - number <= (kept if rank in had else 0):
            return None
        had.add(rank)
        self._next[epoch] = number + 1
        return number

    def state_dict(self) -> dict[LoaderEpoch, tuple[int, list[int]]]:
        """Returns what was handed out, and to whom, by loader and epoch; of the last two epochs."""
        last = max((epoch for _, epoch in self._next), default=0)
        return {key: (number, sorted(self._had[key])) for key, number in self._next.items() if key[1] >= last - 1}

    def load_state_dict(self, state: Mapping[LoaderEpoch, tuple[int, list[int]]]) -> None:
        self._next = {key: number for key, (number, _) in state.items()}
        self._had = {key: set(had) for key, (_, had) in state.items()}
        self._last = {loader: max(epoch for other, epoch in state if other == loader) for loader, _ in state}
