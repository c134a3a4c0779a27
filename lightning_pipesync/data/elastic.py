"""The data of an epoch, divided anew within it among members that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sized
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
        """Returns the place after ``num_batches`` batches of the epoch on each member.

        With an :class:`ElasticSampler` it has the ``offset``, the samples of the epoch that all members have had, and
        what they must have in :meth:`common`.
        """
        place = {"epoch": epoch, "num_batches": num_batches}
        if self.sampler is None:
            return place
        self.begin_at(epoch, num_batches)
        return {**place, "offset": self.sampler.offset, **(self.common() or {})}

    def common(self) -> dict[str, Any] | None:
        """Returns what all members must have in common; None if the order is the user's own."""
        if (sampler := self.sampler) is None:
            return None
        return {
            "samples_in_data_set": sampler.dataset_size,
            "batch_size": batch_size(self._loader),
            "drop_last": sampler.drop_last or self._loader.drop_last,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def go_to(self, place: dict[str, Any]) -> None:
        """Begins the next iteration at a :meth:`place`, of another member, or of one whose order was its own.

        Raises:
            ValueError: this member has other data.
        """
        epoch, num_batches = place["epoch"], place["num_batches"]
        here = self.common()
        if self.sampler is None or here is None or "offset" not in place:
            self.begin_at(epoch, num_batches)
            return
        check_common(here, place)
        self.begin_at(epoch, 0)
        self.sampler.offset, self.sampler.done = place["offset"], num_batches * place["batch_size"]

    def divide(self, place_of_data: tuple[int, int], epoch: int, num_batches: int) -> bool:
        """Divides what is left of the epoch after ``num_batches`` batches from the next iteration on.

        ``place_of_data`` is (k, n): this is then the k-th of n members. Returns whether it was not before.
        """
        if self.sampler is None or place_of_data == (self.sampler.rank, self.sampler.num_replicas):
            return False
        if (epoch, num_batches * batch_size(self._loader)) != (self.sampler.epoch, self.sampler.done):
            self.begin_at(epoch, num_batches)  # batches of the present division, which a newcomer has not shared
        self.sampler.rank, self.sampler.num_replicas = place_of_data
        return True


def check_common(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raises a ValueError if this member has other data than another one, with the first difference."""
    for name, value in here.items():
        if there[name] != value:
            raise ValueError(
                f"This replica divides its training data with {name}={value}, and the others with "
                f"{name}={there[name]}: give all replicas the same data set, batch size, order and seed."
            )
