"""The data of an epoch, divided anew within it among members that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_pipesync.data.loaders import batch_size, sampler_of


class ElasticSampler(DistributedSampler[int]):
    """The order of ``DistributedSampler``, of which any part of an epoch can be divided among other members.

    All members have the permutation of the data set that ``DistributedSampler`` makes of ``seed`` and the epoch. Its
    first ``offset`` samples have been trained on; of the others the k-th of n members has the k-th, (k+n)-th, and so
    on. So after s batches of B samples on each, ``offset + s * B * n`` samples have been trained on, whatever happened
    before, and that number alone says what is left. If it cannot be divided evenly, the first samples of the epoch fill
    up, at most n - 1, or with ``drop_last`` the last ones are left out. With ``offset`` 0 this is
    ``DistributedSampler``, bit for bit.

    Args:
        dataset: Map-style data set with a length, which must not change.
        num_replicas: Number of members.
        rank: This member, from 0 to ``num_replicas - 1``.
        shuffle: Whether to shuffle the data set, anew in every epoch.
        seed: Seed of the shuffle; must be equal on all members.
        drop_last: Whether to drop the last samples if they cannot be divided evenly.

    Attributes:
        offset: number of samples of the epoch that all members had before this division, together.
        done: number of samples that each member had before it; a newcomer counts those of the others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.offset = self.done = 0

    @property
    def num_left(self) -> int:
        """Number of samples that are left in the epoch for each member."""
        left = self.dataset_size - self.offset
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    @property
    def dataset_size(self) -> int:
        return len(cast("Sized", self.dataset))

    def __len__(self) -> int:
        """Returns the number of this member's samples in the epoch, those before the present division too."""
        return self.done + self.num_left

    def __iter__(self) -> Iterator[int]:
        """Iterates over this member's samples that are left of the epoch."""
        size = self.dataset_size
        order = torch.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        mine = self.offset + self.rank + self.num_replicas * torch.arange(self.num_left)
        return iter(order[mine % size].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which is whole if it is another one than before."""
        if epoch != self.epoch:
            self.offset = self.done = 0
        super().set_epoch(epoch)

    def begin_at(self, epoch: int, samples: int) -> None:
        """Begins the next iteration after so many samples of the epoch on each member, of this division or before."""
        self.set_epoch(epoch)
        if samples < self.done:  # the epoch anew
            self.offset = self.done = 0
        self.offset = min(self.dataset_size, self.offset + (samples - self.done) * self.num_replicas)
        self.done = samples


@dataclass(frozen=True)
class Place:
    """A place in the data: after ``num_batches`` batches on each member, ``offset`` samples of the epoch in all.

    The other fields are what members must have in common so that it is the same place for all of them.
    """

    epoch: int
    num_batches: int
    offset: int
    samples_in_data_set: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    seed: int


#: The fields of a place that are the same for all members.
COMMON = ("samples_in_data_set", "batch_size", "drop_last", "shuffle", "seed")


class ElasticOrder:
    """Where a loader is in its epoch, counted in batches, and by an :class:`ElasticSampler` in samples, too.

    Without an :class:`ElasticSampler` the order is the user's own, and stays: nothing is divided.

    Args:
        loader: the loader; with an :class:`ElasticSampler` its batches are torch's, so that the number of samples
            follows from theirs.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, sampler = loader, sampler_of(loader)
        self.sampler = sampler if isinstance(sampler, ElasticSampler) else None

    def begin_at(self, epoch: int, num_batches: int) -> None:
        """Begins the next iteration after ``num_batches`` batches of the epoch.

        If no batch is left, the epoch is over: another division cannot make one of samples that were left out.
        """
        if self.sampler is None:
            return
        self.sampler.begin_at(epoch, num_batches * batch_size(self._loader))
        if num_batches and len(self._loader) <= num_batches:
            self.sampler.offset = self.sampler.dataset_size

    def place(self, epoch: int, num_batches: int) -> dict[str, Any]:
        """Returns the fields of the :class:`Place` after ``num_batches`` batches; of one's own order the first two."""
        if self.sampler is None:
            return {"epoch": epoch, "num_batches": num_batches}
        self.begin_at(epoch, num_batches)
        return asdict(Place(epoch, num_batches, self.sampler.offset, *self._of_data(self.sampler)))

    def common(self) -> dict[str, Any] | None:
        """Returns what all members must have in common; None if the order is the user's own."""
        if self.sampler is None:
            return None
        here = asdict(Place(0, 0, 0, *self._of_data(self.sampler)))
        return {name: here[name] for name in COMMON}

    def go_to(self, place: dict[str, Any]) -> None:
        """Begins the next iteration at a :meth:`place`, of another member, or of one whose order was its own.

        Raises:
            ValueError: this member has other data.
        """
        here = self.common()
        if self.sampler is None or here is None or "offset" not in place:
            self.begin_at(place["epoch"], place["num_batches"])
            return
        there = Place(**place)
        check_common(here, place)
        self.begin_at(there.epoch, 0)
        self.sampler.offset, self.sampler.done = there.offset, there.num_batches * there.batch_size

    def divide(self, place_of_data: tuple[int, int], epoch: int, num_batches: int) -> bool:
        """Divides what is left of the epoch after ``num_batches`` batches from the next iteration on.

        ``place_of_data`` is (k, n): this is then the k-th of n members. Returns whether it was not before.
        """
        if self.sampler is None or place_of_data == (self.sampler.rank, self.sampler.num_replicas):
            return False
        self.begin_at(epoch, num_batches)
        self.sampler.rank, self.sampler.num_replicas = place_of_data
        return True

    def _of_data(self, sampler: ElasticSampler) -> tuple[int, int, bool, bool, int]:
        drop_last = sampler.drop_last or self._loader.drop_last
        return sampler.dataset_size, batch_size(self._loader), drop_last, sampler.shuffle, sampler.seed


def check_common(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raises a ValueError if this member has other data than another one, with the first difference."""
    for name in COMMON:
        if here[name] != there[name]:
            raise ValueError(
                f"This replica divides its training data with {name}={here[name]}, and the others with "
                f"{name}={there[name]}: give all replicas the same data set, batch size, order and seed."
            )
