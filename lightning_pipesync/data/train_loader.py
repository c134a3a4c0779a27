"""A training loader that counts its epochs and batches, and can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_pipesync.data.loaders import LoaderWrapper, sampler_of
from lightning_pipesync.data.order import begin_at


class TrainLoader(LoaderWrapper):
    """A wrapper of a rank's training DataLoader, which counts epochs and batches and can be resumed.

    Each iteration is the next epoch, unless :meth:`set_epoch` sets it, and calls ``set_epoch`` of the samplers and the
    data set. The state is the position in the data::

        saved = loader.state_dict()                 # within an epoch, after a step
        loader.load_state_dict(saved)               # in the resumed run
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            for batch in loader: ...                # first the rest of that epoch

    There is one iterator at a time. Other attributes are the DataLoader's: ``loader.dataset`` and so on. When resuming,
    a sampler that is no ``ResumableSampler`` fetches the skipped batches, and its order must depend on the epoch alone.

    Args:
        loader: the DataLoader, with this rank's order, and of the same length on all ranks.
        finish: called on each batch: injects rows, moves it to the device.

    Attributes:
        loader: the DataLoader.
        epoch: the epoch of the last batch, or the next epoch if that one is over.
    """

    def __init__(self, loader: DataLoader[Any], finish: Callable[[Any], Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._finish = finish
        self._has_begun, self._num_batches = False, 0  # whether the epoch has started; its batches so far

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of an epoch. With data injection every rank must take the same number of them."""
        if self._has_begun:  # the last iteration stopped early
            self.set_epoch(self.epoch + 1)
        self._has_begun = True
        skipped = self._num_batches
        begins_within = begin_at(self.loader, self.epoch, skipped)
        self._set_epoch_of_data()
        batches = iter(self.loader)
        for batch in batches if begins_within else islice(batches, skipped, None):
            self._num_batches += 1
            yield self._finish(batch)
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which starts at its first batch, or where a resumed run is in it."""
        if epoch != self.epoch or self._has_begun:
            self.epoch, self._has_begun, self._num_batches = epoch, False, 0

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and the number of its batches so far."""
        return {"epoch": self.epoch, "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next iteration resume from a ``state_dict``."""
        self.epoch, self._has_begun, self._num_batches = state["epoch"], False, state["num_batches"]

    def _set_epoch_of_data(self) -> None:
        ordering: tuple[Any, ...] = (self.loader.dataset, self.loader.batch_sampler, sampler_of(self.loader))
        for part in ordering:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
