"""What the strategies change about a training loader: the order of the data, where it begins, the size of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_pipesync.compat import replace_sampler
from lightning_pipesync.data import ResumableSampler, SelDPSampler, adjusted_batch_size


def check_num_samples(loader: DataLoader, world_size: int) -> None:
    """Checks that every rank gets a sample of its own.

    Raises:
        ValueError: the data is divided among the ranks, and there are fewer samples than ranks.
    """
    num_samples = sized_len(loader.dataset)
    divided = isinstance(_sampler(loader), DistributedSampler)
    if divided and num_samples is not None and num_samples < world_size:
        raise ValueError(f"The training data set has {num_samples} samples, too few for {world_size} ranks.")


def can_use_seldp(loader: DataLoader) -> bool:
    """Returns whether the order of ``loader`` is Lightning's own, and SelDP may take its place.

    What the user chose is respected: iterable data sets, other samplers, and what ``use_distributed_sampler=False``
    left alone stay as they are, with a warning where SelDP was to be expected.
    """
    sampler = _sampler(loader)
    if isinstance(loader.dataset, IterableDataset):
        rank_zero_warn("SelDP cannot reorder an iterable data set; it must itself give each rank data of its own.")
    elif isinstance(sampler, DistributedSampler) and type(sampler) not in (DistributedSampler, SelDPSampler):
        rank_zero_warn(f"SelDP leaves the order to {type(sampler).__name__}; set partition='defdp' to say so.")
    return type(sampler) is DistributedSampler


def with_seldp(
    loader: DataLoader,
    *,
    full_pass: bool,
    num_samples: int | None = None,
    limit: int | float = 1.0,
) -> DataLoader:
    """Returns ``loader``, for which :func:`can_use_seldp` holds, in the order of SelDP.

    Args:
        loader: as Lightning has prepared it, with a DistributedSampler of its own.
        full_pass: see :class:`SelDPSampler`.
        num_samples: another number of samples a batch.
        limit: how much of the loader is used in an epoch: a number of batches, or a fraction.
    """
    given = _sampler(loader)
    assert isinstance(given, DistributedSampler)
    sampler = SelDPSampler(
        given.dataset,
        num_replicas=given.num_replicas,
        rank=given.rank,
        shuffle=given.shuffle,
        seed=given.seed,
        drop_last=given.drop_last,
        full_pass=full_pass,
    )
    loader = replace_sampler(loader, sampler)
    if num_samples is not None:
        loader.batch_sampler.batch_size = num_samples  # type: ignore[union-attr]
    if loader.generator is None:
        # Without one, every epoch draws a seed from the global generator, and a resumed run draws fewer.
        loader.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)

    num_batches = len(loader)
    used = min(limit, num_batches) if isinstance(limit, int) else int(limit * num_batches)
    if used * batch_size(loader) < len(sampler):
        sampler.samples_per_epoch = max(1, used * batch_size(loader))
    return loader


def resumable(loader: DataLoader) -> DataLoader:
    """Returns ``loader`` in the same order, with which :func:`begin_at` works if the order is Lightning's own."""
    given = _sampler(loader)
    if type(given) is not DistributedSampler or not _counts_samples(loader):
        return loader
    sampler = ResumableSampler(
        given.dataset, given.num_replicas, given.rank, given.shuffle, given.seed, given.drop_last
    )
    return replace_sampler(loader, sampler)


def begin_at(loader: DataLoader, epoch: int, num_batches: int, on_skip: Callable[[], object]) -> bool:
    """Has ``loader``, if its order is one that can, begin where a resumed run does.

    Args:
        loader: as training uses it.
        epoch: the epoch in which the run goes on.
        num_batches: how many batches that epoch already had; more than ``loader`` has if it was cycled, or used up.
        on_skip: called before its first sample is fetched, if it begins within an epoch.

    Returns:
        Whether it begins within an epoch.
    """
    sampler = _sampler(loader)
    if not isinstance(sampler, ResumableSampler) or not _counts_samples(loader):
        return False
    sampler.set_epoch(epoch)  # Lightning does so, too, but after worker processes have begun to fetch
    if num_batches == 0 or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False  # with those, Lightning has the loader itself go on where it was
    rounds, batches = divmod(num_batches, len(loader))
    sampler.start, sampler.on_skip = (epoch, rounds * len(sampler) + batches * batch_size(loader)), on_skip
    return True


@contextmanager
def no_warning_about_resuming() -> Iterator[None]:
    """Keeps Lightning from saying that a loader without a ``state_dict`` cannot go on within an epoch: ours can."""
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


def batch_size_before_injection(loader: DataLoader, injection: tuple[float, float], world_size: int) -> int:
    """Returns the number of samples a batch that leaves room for what data injection adds (SelSync Eq. 3).

    Raises:
        ValueError: the loader does not make batches, or its batch sampler has no ``batch_size``.
    """
    if loader.batch_sampler is None:
        raise ValueError(
            f"injection={injection} needs a training loader that makes batches, and this one has batch_size=None: "
            "let it make them, or set injection=None."
        )
    return adjusted_batch_size(batch_size(loader), *injection, world_size)


def with_batch_size(loader: DataLoader, num_samples: int) -> DataLoader:
    """Returns ``loader``, which has a :func:`batch_size`, with another number of samples a batch."""
    loader = replace_sampler(loader, _sampler(loader))  # a new one: the user's stays as it is
    loader.batch_sampler.batch_size = num_samples  # type: ignore[union-attr]
    return loader


def batch_size(loader: DataLoader) -> int:
    """Returns the number of samples a batch: 1 if the loader leaves it to the data set to make batches.

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


def _counts_samples(loader: DataLoader) -> bool:
    """Returns whether so many batches are so many samples: a batch sampler of the user's own may do as it likes."""
    return loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler


def _sampler(loader: DataLoader) -> object:
    """Returns what orders the data: with a batch sampler of the user's own, the loader's is not in use."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
