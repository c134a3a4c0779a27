"""The batches of a training loop, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_pipesync.data.loaders import LoaderInPlace, begin_at, sampler_of


class TrainLoader(LoaderInPlace):
    """A rank's batches of the training data, in the place of the DataLoader that they come from.

    Each iteration begins the next epoch, unless :meth:`set_epoch` says which one, and tells it to whatever orders the
    data. The state says where a run stopped::

        saved = loader.state_dict()                 # within an epoch, after a step
        loader.load_state_dict(saved)               # in the run that goes on
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            for batch in loader: ...                # at first the batches that are left of that epoch

    There is one iterator at a time. What else is asked of it is the DataLoader's: ``loader.dataset`` and so on.
    An order that this package does not know fetches the batches that it skips, and has to be that of the epoch alone.

    Args:
        loader: whose order is this rank's, and whose length is the same on all ranks.
        finish: what makes a batch of the training of one of the loader's: injects rows, moves it to the device.

    Attributes:
        loader: the DataLoader.
        epoch: the epoch of the last batch, or of the next one if its epoch is over.
    """

    def __init__(self, loader: DataLoader, finish: Callable[[Any], Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self._finish = finish
        self._has_begun, self._num_batches = False, 0  # the epoch, and how many of its batches were handed out

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of an epoch. With data injection every rank has to take as many of them."""
        if self._has_begun:  # and was left early
            self.set_epoch(self.epoch + 1)
        self._has_begun = True
        skipped = self._num_batches
        begins_within = begin_at(self.loader, self.epoch, skipped)
        self._tell_epoch()
        batches = iter(self.loader)
        for batch in batches if begins_within else islice(batches, skipped, None):
            self._num_batches += 1
            yield self._finish(batch)
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Has the next iteration be that of ``epoch``, from its first batch, or where a resumed run is within it."""
        if epoch != self.epoch or self._has_begun:
            self.epoch, self._has_begun, self._num_batches = epoch, False, 0

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch, and how many of its batches were handed out."""
        return {"epoch": self.epoch, "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Has the next iteration go on from a ``state_dict``."""
        self.epoch, self._has_begun, self._num_batches = state["epoch"], False, state["num_batches"]

    def _tell_epoch(self) -> None:
        told: tuple[Any, ...] = (self.loader.dataset, self.loader.batch_sampler, sampler_of(self.loader))
        for one in told:
            if hasattr(one, "set_epoch"):
                one.set_epoch(self.epoch)
