"""What SelSync changes about a training loader: the order of the data, and the size of a batch."""

from __future__ import annotations

import warnings

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_pipesync.compat import replace_sampler
from lightning_pipesync.data import SelDPSampler


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
    start: tuple[int, int] = (0, 0),
) -> DataLoader:
    """Returns ``loader``, for which :func:`can_use_seldp` holds, in the order of SelDP.

    Args:
        loader: as Lightning has prepared it, with a DistributedSampler of its own.
        full_pass: see :class:`SelDPSampler`.
        num_samples: another number of samples a batch.
        limit: how much of the loader is used in an epoch: a number of batches, or a fraction.
        start: epoch, and number of its batches that are already trained, where a resumed run begins.
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
    epoch, trained = start
    sampler.set_epoch(epoch)
    if trained:
        sampler.start = (epoch, min(len(sampler), trained * batch_size(loader)))
        # Lightning recognises a resumable loader by methods that this one does not need.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    return loader


def with_batch_size(loader: DataLoader, num_samples: int) -> DataLoader:
    """Returns ``loader``, which has a :func:`batch_size`, with another number of samples a batch."""
    loader = replace_sampler(loader, _sampler(loader))  # a new one: the user's stays as it is
    loader.batch_sampler.batch_size = num_samples  # type: ignore[union-attr]
    return loader


def batch_size(loader: DataLoader) -> int:
    """Returns the number of samples a batch.

    Raises:
        ValueError: the loader does not make batches itself, or by a batch sampler without a ``batch_size``.
    """
    num_samples = getattr(loader.batch_sampler, "batch_size", None)
    if num_samples is None:
        raise ValueError(
            f"The training loader's batch sampler ({type(loader.batch_sampler).__name__}) has no batch_size, which "
            "SelDP and data injection need: give it one, or set partition='defdp' and injection=None."
        )
    return int(num_samples)


def _sampler(loader: DataLoader) -> object:
    """Returns what orders the data: with a batch sampler of the user's own, the loader's is not in use."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
