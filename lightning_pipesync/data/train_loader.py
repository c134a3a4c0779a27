"""A training loader that counts its epochs and batches, and can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_pipesync.data.elastic import ElasticOrder
from lightning_pipesync.data.loaders import LoaderWrapper, num_batches, sampler_of
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
    a sampler that is no ``ElasticSampler`` or ``ResumableSampler`` fetches the skipped batches, and its order must
    depend on the epoch alone.

    What is left of an epoch that has an ``ElasticSampler`` can be divided anew while it is iterated over, see
    :meth:`redivide`. What worker processes have fetched of the old division is thrown away.

    Args:
        loader: the DataLoader, with this rank's order, and of the same length on all ranks.
        finish: called on each batch: injects rows, moves it to the device.
        between: called before each batch, but not where an epoch ends; it may raise.

    Attributes:
        loader: the DataLoader.
        epoch: the epoch of the last batch, or the next epoch if that one is over.
    """

    def __init__(
        self, loader: DataLoader[Any], finish: Callable[[Any], Any], between: Callable[[], object] = lambda: None
    ) -> None:
        self.loader = loader
        self.epoch = 0
        self._finish, self._between = finish, between
        self._order = ElasticOrder(loader)
        self._has_begun, self._num_batches = False, 0  # whether the epoch has started; its batches so far
        self._is_elsewhere = False  # whether the next batch is one of another iteration over the DataLoader

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of an epoch. With data injection every rank must take the same number of them."""
        if self._has_begun:  # the last iteration stopped early
            self.set_epoch(self.epoch + 1)
        self._between()
        self._is_elsewhere = True
        while self._is_elsewhere:
            self._has_begun, self._is_elsewhere = True, False
            rest = self._rest()
            for batch in rest:
                self._num_batches += 1
                yield self._finish(batch)
                if not self._is_over:  # otherwise the loop does first what follows an epoch
                    self._between()
                if self._is_elsewhere:
                    break
            rest.close()  # ends worker processes before others start
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which starts at its first batch, or where a resumed run is in it."""
        if epoch != self.epoch or self._has_begun:
            self.epoch, self._has_begun, self._num_batches = epoch, False, 0
            self._order.begin_at(epoch, 0)

    @property
    def _is_over(self) -> bool:
        """Whether no batch is left of the epoch, as it is divided now; False if the data set does not know."""
        length = num_batches(self.loader)
        return length is not None and 0 < length <= self._num_batches

    @property
    def num_batches(self) -> int:
        """Number of batches of the epoch so far."""
        return self._num_batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the number of its batches so far; see :meth:`ElasticOrder.place`."""
        return self._order.place(self.epoch, self._num_batches)

    def common(self) -> dict[str, Any] | None:
        """Returns what the members must have in common; None without an ``ElasticSampler``."""
        return self._order.common()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration resume from a ``state_dict``; an iteration that runs continues there.

        If it runs and ``state`` is in another epoch, it continues within that one.

        Raises:
            ValueError: the state is that of other data.
        """
        self._order.go_to(state)
        self.epoch, self._has_begun, self._num_batches = state["epoch"], False, state["num_batches"]
        self._is_elsewhere = True

    def skip_ended_epoch(self) -> None:
        """Sets the next epoch, if the next iteration would begin where no batch is left of one."""
        if self._is_over:
            self.set_epoch(self.epoch + 1)

    def redivide(self, place_of_data: tuple[int, int]) -> None:
        """Divides what is left of the epoch, from the next batch on: this is now the k-th of n members, as in (k, n).

        Members that call this do so after the same number of batches of the epoch. Without an ``ElasticSampler`` the
        order stays.
        """
        if self._order.divide(place_of_data, self.epoch, self._num_batches):
            self._is_elsewhere = True

    def _rest(self) -> Generator[Any, None, None]:
        """Returns the batches that are left of the epoch."""
        skipped = self._num_batches
        self._order.begin_at(self.epoch, skipped)
        begins_within = self._order.sampler is not None or begin_at(self.loader, self.epoch, skipped)
        self._set_epoch_of_data()
        batches = iter(self.loader)
        yield from batches if begins_within else islice(batches, skipped, None)

    def _set_epoch_of_data(self) -> None:
        ordering: tuple[Any, ...] = (self.loader.dataset, self.loader.batch_sampler, sampler_of(self.loader))
        for part in ordering:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
