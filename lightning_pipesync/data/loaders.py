"""Changes to a training DataLoader: the order of the data, its start, and the batch size."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_pipesync.core.torch_private import copy_loader
from lightning_pipesync.data.injection import adjusted_batch_size
from lightning_pipesync.data.resumable import ResumableSampler
from lightning_pipesync.data.seldp import SelDPSampler
from lightning_pipesync.data.work_queue import Ask, WorkQueueBatches


class LoaderWrapper:
    """A wrapper of a loader, with the same length and attributes.

    Attributes:
        loader: the wrapped loader.
    """

    loader: Any

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # copy() asks for it before it is set
            raise AttributeError(name)
        return getattr(self.loader, name)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Returns the sampler in use: that of the batch sampler, or the batch sampler itself if it has none."""
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def has_default_order(loader: DataLoader[Any]) -> bool:
    """Returns whether the order of ``loader`` is torch's: sequential, or a shuffle of the whole data set."""
    sampler = sampler_of(loader)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def with_seldp(
    loader: DataLoader[Any],
    order: DistributedSampler[Any],
    *,
    full_pass: bool,
    num_samples: int | None = None,
    limit: int | float = 1.0,
) -> DataLoader[Any]:
    """Returns a loader of the same data in the order of SelDP (SelSync III-D).

    Args:
        loader: a loader of a map-style data set.
        order: the sampler to replace, whose data set, ranks, shuffle, seed and ``drop_last`` stay.
        full_pass: see :class:`SelDPSampler`.
        num_samples: a new batch size.
        limit: the part of the loader that an epoch uses: a number of batches, or a fraction.
    """
    sampler = SelDPSampler(
        order.dataset,
        num_replicas=order.num_replicas,
        rank=order.rank,
        shuffle=order.shuffle,
        seed=order.seed,
        drop_last=order.drop_last,
        full_pass=full_pass,
    )
    loader = with_seed_of_its_own(with_order(loader, sampler, num_samples))
    num_batches = len(loader)
    used = min(limit, num_batches) if isinstance(limit, int) else int(limit * num_batches)
    if used * batch_size(loader) < len(sampler):
        sampler.samples_per_epoch = max(1, used * batch_size(loader))
    return loader


def with_work_queue(
    loader: DataLoader[Any],
    ask: Ask,
    number: int,
    *,
    to_each_of: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
) -> DataLoader[Any]:
    """Returns a loader of the same data whose batches are handed out.

    Args:
        loader: a loader of a map-style data set; a ``DistributedSampler`` keeps its own seed and shuffle.
        ask: asks for a batch.
        number: of the loader, the same on all ranks, another one for each.
        to_each_of: the number of ranks, if each is to get one batch of an epoch at least; None: they need not.
        seed: of the order, the same on all ranks.
        shuffle: whether the order of the samples is another one in each epoch.

    Raises:
        ValueError: the loader does not make batches, or an epoch has fewer of them than there are ranks.
    """
    if loader.batch_sampler is None:
        raise ValueError(
            "partition='work_queue' hands out batches, and this loader has batch_size=None: let it make them, or "
            "set partition='defdp'."
        )
    if isinstance(order := sampler_of(loader), DistributedSampler):
        seed, shuffle = order.seed, order.shuffle
    drop_last = getattr(loader.batch_sampler, "drop_last", False)
    batches = WorkQueueBatches(
        loader.dataset, batch_size(loader), shuffle, seed, drop_last, ask, number, to_each_of is not None
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
    """Sets where ``loader`` starts in a resumed run, if its sampler is a :class:`ResumableSampler`.

    Args:
        loader: the training loader.
        epoch: the epoch in which the run resumes.
        num_batches: the number of batches of that epoch that are done; more than ``loader`` has if it was cycled.
        on_skip: called before the first sample is fetched, if the loader starts within an epoch.

    Returns:
        Whether the loader starts within an epoch.
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


def batch_size_before_injection(
    loader: DataLoader[Any], injection: tuple[float, float] | None, world_size: int
) -> int | None:
    """Returns the batch size of the loader before data injection adds rows (SelSync Eq. 3); None without injection.

    Raises:
        ValueError: the loader does not make batches, or its batch sampler has no ``batch_size`` or ``sampler``.
    """
    if injection is None:
        return None
    if loader.batch_sampler is None:
        raise ValueError(
            f"injection={injection} needs a training loader that makes batches, and this one has batch_size=None: "
            "let it make them, or set injection=None."
        )
    if sampler_of(loader) is loader.batch_sampler:
        raise ValueError(
            f"injection={injection} changes the size of batches, and the {type(loader.batch_sampler).__name__} of the "
            "training loader has no attribute 'sampler': give it one, or set injection=None."
        )
    return adjusted_batch_size(batch_size(loader), *injection, world_size)


def with_order(loader: DataLoader[Any], sampler: Any, num_samples: int | None = None) -> DataLoader[Any]:
    """Returns a shallow copy of ``loader`` in the order of ``sampler``; ``loader`` itself stays as it is.

    Args:
        loader: a DataLoader of any class; its batch sampler is copied, too.
        sampler: the new order.
        num_samples: a new batch size.

    Raises:
        ValueError: the batch sampler has no attribute ``sampler``.
    """
    batch_sampler: Any = copy(loader.batch_sampler)
    if batch_sampler is not None:
        if not hasattr(batch_sampler, "sampler"):
            raise ValueError(
                f"The training loader's batch sampler ({type(batch_sampler).__name__}) has no attribute 'sampler' to "
                "set another order of the data in: give it one."
            )
        batch_sampler.sampler = sampler
        if num_samples is not None:
            batch_sampler.batch_size = num_samples
    return copy_loader(loader, sampler, batch_sampler)


def with_seed_of_its_own(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Sets a generator on ``loader`` if it has none, and returns the loader.

    Without one, every epoch draws a seed from the global generator, and a resumed run draws fewer seeds.
    """
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    return loader


def num_batches(loader: Any) -> int | None:
    """Returns the number of batches in an epoch; None if a data set does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def batch_size(loader: DataLoader[Any]) -> int:
    """Returns the batch size; 1 if the loader does not batch.

    Raises:
        ValueError: the batch sampler has no ``batch_size``.
    """
    if loader.batch_sampler is None:
        return 1
    num_samples = getattr(loader.batch_sampler, "batch_size", None)
    if num_samples is None:
        raise ValueError(
            f"The training loader's batch sampler ({type(loader.batch_sampler).__name__}) has no batch_size, which "
            "SelDP and data injection need: give it one, or set partition='defdp' and injection=None."
        )
    return int(num_samples)


def counts_samples(loader: DataLoader[Any]) -> bool:
    """Returns whether the number of samples follows from the number of batches, as with torch's batch sampler."""
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
