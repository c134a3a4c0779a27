"""What SelSync changes about a training loader: the order of the data and the size of a batch."""

from __future__ import annotations

import warnings

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_pipesync.compat import replace_sampler
from lightning_pipesync.data import SelDPSampler


def with_seldp(loader: DataLoader, *, full_pass: bool, start: tuple[int, int]) -> DataLoader:
    """Returns ``loader`` in the order of SelDP, where its order is Lightning's own.

    What the user chose is respected: iterable data sets, other samplers, and what ``use_distributed_sampler=False``
    left alone stay as they are, with a warning where SelDP was to be expected.

    Args:
        loader: as Lightning has prepared it, with a DistributedSampler of its own.
        full_pass: see :class:`SelDPSampler`.
        start: epoch, and number of its samples that are already trained, where a resumed run begins.
    """
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(loader.dataset, IterableDataset):
        rank_zero_warn("SelDP cannot reorder an iterable data set; it must itself give each rank data of its own.")
        return loader
    if isinstance(sampler, SelDPSampler):
        return loader
    if type(sampler) is not DistributedSampler:
        if isinstance(sampler, DistributedSampler):
            rank_zero_warn(f"SelDP leaves the order to {type(sampler).__name__}; set partition='defdp' to say so.")
        return loader
    seldp = SelDPSampler(
        sampler.dataset,
        num_replicas=sampler.num_replicas,
        rank=sampler.rank,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
        full_pass=full_pass,
    )
    epoch, samples = start
    seldp.set_epoch(epoch)
    if samples:
        seldp.start = (epoch, min(samples, len(seldp)))
        # Lightning recognises a resumable loader by methods that this one does not need.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    loader = replace_sampler(loader, seldp)
    if loader.generator is None:
        # Without one, every epoch draws a seed from the global generator, and a resumed run draws fewer.
        loader.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    return loader


def with_batch_size(loader: DataLoader, num_samples: int) -> DataLoader:
    """Returns ``loader``, which has a :func:`batch_size`, with another number of samples a batch."""
    loader = replace_sampler(loader, loader.sampler)  # a new one: the user's stays as it is
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
            "data injection and a resumed SelDP need: give it one, or set partition='defdp' and injection=None."
        )
    return int(num_samples)
