"""The order of the training data, for all frameworks: what settings replace, by which order, and where it starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sized
from copy import copy
from typing import Any, Protocol, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_pipesync.core.torch_private import copy_loader
from lightning_pipesync.data.elastic import ElasticSampler
from lightning_pipesync.data.loaders import batch_size, counts_samples, sampler_of, with_order, with_seed_of_its_own
from lightning_pipesync.data.samplers import ResumableSampler, SelDPSampler
from lightning_pipesync.data.work_queue import Ask, WorkQueueBatches


class DataSettings(Protocol):
    """Settings of the training data."""

    @property
    def partition(self) -> str:
        """``"seldp"``, ``"defdp"`` for the loader's order, or ``"work_queue"``: ranks take batches from a queue."""

    @property
    def full_pass(self) -> bool:
        """Whether an epoch of SelDP is a rank's whole queue of chunks instead of one chunk."""

    @property
    def injection(self) -> tuple[float, float] | None:
        """``(alpha, beta)`` of data injection; None: there is none."""


def replaceable_order(
    loader: DataLoader[Any],
    settings: DataSettings,
    rank: int,
    world_size: int,
    seed: int | None = None,
    drop_last: bool = False,
    divided: bool = False,
) -> DistributedSampler[Any] | None:
    """Returns the order of ``loader`` as a ``DistributedSampler``, if it is one that ``settings`` may replace.

    That is a ``DistributedSampler`` itself, or with ``seed`` torch's order of a map-style data set, shuffled or not.
    Any other order is the user's, and stays: rank 0 warns if SelDP has no effect on it. ``divided``: the framework
    divides its batches among the ranks.
    """
    order, iterable = sampler_of(loader), isinstance(loader.dataset, IterableDataset)
    if type(order) is DistributedSampler and not iterable:
        return order
    if seed is not None and not iterable and _has_default_order(loader):
        shuffle = type(order) is RandomSampler
        return DistributedSampler(loader.dataset, world_size, rank, shuffle, seed, drop_last)
    if settings.partition == "seldp" and rank == 0 and not isinstance(order, SelDPSampler):
        remains = "which itself has to give each rank data of its own"
        if divided:
            remains = "whose batches are divided among the ranks, and which must have the same order on all of them"
        warnings.warn(
            f"partition={settings.partition!r} has no effect on a loader with {order_in_words(loader)}, {remains}. Set "
            "partition='defdp' to say so.",
            stacklevel=4,
        )
    return None


def order_in_words(loader: DataLoader[Any]) -> str:
    iterable = isinstance(loader.dataset, IterableDataset)
    return "an iterable data set" if iterable else f"a {type(sampler_of(loader)).__name__}"


def in_order(
    loader: DataLoader[Any],
    settings: DataSettings,
    order: DistributedSampler[Any] | None,
    num_samples: int | None,
    limit: int | float = 1.0,
) -> DataLoader[Any]:
    """Returns ``loader`` in the order of SelDP if that is set, and with ``num_samples`` in a batch if that is given.

    ``order`` is what :func:`replaceable_order` returned. ``limit`` is the part of the loader that an epoch uses: a
    number of batches, or a fraction.
    """
    if settings.partition != "seldp" or order is None:
        return loader if num_samples is None else with_order(loader, sampler_of(loader), num_samples)
    of_ranks = order.num_replicas, order.rank, order.shuffle, order.seed, order.drop_last
    sampler = SelDPSampler(order.dataset, *of_ranks, full_pass=settings.full_pass)
    loader = with_seed_of_its_own(with_order(loader, sampler, num_samples))
    num_batches = len(loader)
    used = min(limit, num_batches) if isinstance(limit, int) else int(limit * num_batches)
    if used * batch_size(loader) < len(sampler):
        sampler.samples_per_epoch = max(1, used * batch_size(loader))
    return loader


def in_elastic_order(
    loader: DataLoader[Any],
    settings: DataSettings,
    place_of_data: tuple[int, int],
    seed: int | None,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Returns a copy of ``loader`` whose epochs can be divided anew among members that come and go.

    The user's own order stays, with a warning.

    Args:
        loader: the loader.
        settings: those of the data.
        place_of_data: (k, n): this is the k-th of n members.
        seed: as in :func:`replaceable_order`.
        drop_last: whether samples are left out that cannot be divided evenly, if the order is torch's.

    Raises:
        ValueError: all members would train on the same batches, since a batch sampler of the user's own makes them.
    """
    rank, world_size = place_of_data
    order = replaceable_order(loader, settings, rank, world_size, seed, drop_last)
    if order is None:
        warnings.warn(
            f"A loader with {order_in_words(loader)} cannot be divided among replicas that come and go: each trains on "
            "what its own loader gives, which has to be data of its own. Leave out the sampler to have the data set "
            "divided.",
            stacklevel=4,
        )
        return copy(loader)
    if not counts_samples(loader):
        raise ValueError(
            f"All replicas would train on the same batches: a {type(loader.batch_sampler).__name__} makes them in "
            "torch's order, which cannot be divided among replicas that come and go. Leave out batch_sampler=, or give "
            "each replica's a sampler with an order of its own."
        )
    return with_order(
        loader, ElasticSampler(order.dataset, world_size, rank, order.shuffle, order.seed, order.drop_last)
    )


def with_work_queue(
    loader: DataLoader[Any],
    order: DistributedSampler[Any] | None,
    ask: Ask,
    number: int,
    *,
    to_each_of: int | None = None,
) -> DataLoader[Any]:
    """Returns a loader of the same map-style data set that takes its batches from a work queue of all ranks.

    ``order`` is what :func:`replaceable_order` returned; it is replaced, and its shuffle and seed stay. ``number`` is
    that of the loader, the same on all ranks. ``to_each_of`` is the number of ranks if each is to get one batch of an
    epoch at least.

    Raises:
        ValueError: the order is the user's own, the loader makes no batches, or they are too few.
    """
    if order is None:
        raise ValueError(
            "partition='work_queue' hands out the samples of a map-style data set in the framework's or torch's order, "
            f"and this loader has {type(loader.dataset).__name__} with a {type(sampler_of(loader)).__name__}: leave "
            "out the sampler, or set partition='defdp'."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "partition='work_queue' hands out batches, and this loader has batch_size=None: let it make them, or "
            "set partition='defdp'."
        )
    drop_last = getattr(loader.batch_sampler, "drop_last", False)
    batches = WorkQueueBatches(
        loader.dataset, batch_size(loader), order.shuffle, order.seed, drop_last, ask, number, to_each_of is not None
    )
    if to_each_of is not None and batches.num_batches < to_each_of:
        raise ValueError(f"An epoch has {batches.num_batches} batches to hand out, too few for {to_each_of} ranks.")
    return with_seed_of_its_own(copy_loader(loader, loader.sampler, batches))


def resumable(order: DistributedSampler[Any]) -> ResumableSampler:
    """Returns a sampler of the same order that can start within an epoch, see :func:`begin_at`."""
    return ResumableSampler(order.dataset, order.num_replicas, order.rank, order.shuffle, order.seed, order.drop_last)


def begin_at(
    loader: DataLoader[Any], epoch: int, num_batches: int, on_skip: Callable[[], object] = lambda: None
) -> bool:
    """Sets where ``loader`` starts in a resumed run; returns whether it can and does start within an epoch.

    ``num_batches`` of the epoch are done, more than ``loader`` has if it was cycled. ``on_skip`` is called before the
    first sample is fetched, if a :class:`ResumableSampler` starts within an epoch.
    """
    sampler = sampler_of(loader)
    if isinstance(sampler, WorkQueueBatches):
        sampler.set_epoch(epoch)
        return True  # the queue resumes where it was
    if not isinstance(sampler, ResumableSampler) or not counts_samples(loader):
        return False
    sampler.set_epoch(epoch)  # whoever iterates does so, too, but after worker processes have started to fetch
    if num_batches == 0 or len(loader) == 0 or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False  # such a loader resumes by itself
    rounds, batches = divmod(num_batches, len(loader))
    sampler.start, sampler.on_skip = (epoch, rounds * len(sampler) + batches * batch_size(loader)), on_skip
    return True


def check_num_samples(loader: DataLoader[Any], world_size: int) -> None:
    """Raises a ValueError if the data is divided among the ranks and has fewer samples than there are ranks."""
    sampler: Any = sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and (num_samples := len(cast("Sized", sampler.dataset))) < world_size:
        raise ValueError(f"The training data set has {num_samples} samples, too few for {world_size} ranks.")


def with_resumable_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns ``loader`` in the same order; if that is the framework's, it can resume within an epoch."""
    order = sampler_of(loader)
    if type(order) is not DistributedSampler or not counts_samples(loader):
        return loader
    return with_order(loader, resumable(order))


def _has_default_order(loader: DataLoader[Any]) -> bool:
    """Returns whether the order of ``loader`` is torch's: sequential, or a shuffle of the whole data set."""
    sampler = sampler_of(loader)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler
