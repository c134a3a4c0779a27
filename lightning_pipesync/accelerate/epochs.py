"""Epochs of prepared loaders: each iteration is the next one, and the epoch determines the order on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from accelerate.data_loader import skip_first_batches
from torch.utils.data import Sampler


class NextEpoch:
    """A prepared loader whose next iteration is the next epoch, unless ``set_epoch`` is called before.

    Accelerate counts an epoch when it ends. Otherwise one that stops early, or of which only the rest was iterated
    over, would come again.
    """

    iteration: int
    _begun: int | None = None  # the epoch that has begun, until another one is set

    def __iter__(self) -> Iterator[Any]:
        if self._begun == self.iteration:
            self.set_epoch(self.iteration + 1)
        epoch = self.iteration
        for batch in super().__iter__():  # type: ignore[misc]
            self._begun = epoch
            yield batch

    def set_epoch(self, epoch: int) -> None:
        self._begun = None
        super().set_epoch(epoch)  # type: ignore[misc]

    def begins(self) -> None:
        """Notes that the epoch begins in another loader."""
        self._begun = self.iteration


def counting_epochs(prepared: Any) -> Any:
    """Makes a loader that Accelerate has prepared a :class:`NextEpoch`."""
    kind = type(prepared)
    set_class = object.__dict__["__class__"].__set__  # Accelerate's own property of this name cannot be set
    set_class(prepared, type(kind.__name__, (NextEpoch, kind), {}))
    return prepared


def rest_of_epoch(loader: Any, num_batches: int) -> Any:
    """Returns a prepared loader without its first batches; the next iteration over the loader is the epoch after."""
    rest = skip_first_batches(loader, num_batches)
    if isinstance(loader, NextEpoch):
        loader.begins()
    return rest


class SeededSampler(Sampler[Any]):
    """The user's sampler, whose generator each epoch seeds, so that its order is the same on all ranks.

    Args:
        sampler: has an attribute ``generator``. It stays as it is.
        seed: of the first epoch, the same on all ranks.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler, self.seed, self.epoch = copy(sampler), seed, 0
        self.sampler.generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        self.sampler.generator.manual_seed(self.seed + self.epoch)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
