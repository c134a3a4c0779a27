"""Epochs of prepared loaders: each iteration is the next one, and the epoch determines the order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from accelerate.data_loader import skip_first_batches
from torch.utils.data import Sampler

from lightning_pipesync.data.loaders import LoaderWrapper


class EpochLoader(LoaderWrapper):
    """A prepared loader whose next iteration is the next epoch, unless ``set_epoch`` is called before.

    Accelerate counts an epoch when it ends. Otherwise one that stops early, or of which only the rest was iterated
    over, would come again.

    Args:
        loader: what Accelerate has prepared.
        inject: appends rows of other ranks to each batch.
    """

    def __init__(self, loader: Any, inject: Callable[[Any], Any] | None = None) -> None:
        self.loader, self._inject = loader, inject
        self._begun: int | None = None  # the epoch that has begun, until another one is set

    def __iter__(self) -> Iterator[Any]:
        if self._begun == self.loader.iteration:
            self.set_epoch(self.loader.iteration + 1)
        epoch = self.loader.iteration
        for batch in self.loader:
            self._begun = epoch
            if self._inject is not None:
                self.loader.remainder = 0  # the last batch has rows of others, and no sample twice
                batch = self._inject(batch)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._begun = None
        self.loader.set_epoch(epoch)

    def skip_first_batches(self, num_batches: int) -> EpochLoader:
        """Returns a loader of the epoch without its first batches; this one goes on with the epoch after."""
        self._begun = self.loader.iteration
        rest = skip_first_batches(self.loader, num_batches)
        rest.set_epoch(self._begun)
        return EpochLoader(rest, self._inject)


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
