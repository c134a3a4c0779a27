"""Which training loaders the strategies may change, and what Lightning says about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_pipesync.data import SelDPSampler
from lightning_pipesync.data.loaders import counts_samples, resumable, sampler_of, with_order


def check_num_samples(loader: DataLoader, world_size: int) -> None:
    """Checks that every rank gets a sample of its own.

    Raises:
        ValueError: the data is divided among the ranks, and there are fewer samples than ranks.
    """
    num_samples = sized_len(loader.dataset)
    divided = isinstance(sampler_of(loader), DistributedSampler)
    if divided and num_samples is not None and num_samples < world_size:
        raise ValueError(f"The training data set has {num_samples} samples, too few for {world_size} ranks.")


def can_use_seldp(loader: DataLoader) -> bool:
    """Returns whether the order of ``loader`` is Lightning's own, and SelDP may take its place.

    What the user chose is respected: iterable data sets, other samplers, and what ``use_distributed_sampler=False``
    left alone stay as they are, with a warning where SelDP was to be expected.
    """
    sampler = sampler_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        rank_zero_warn("SelDP cannot reorder an iterable data set; it must itself give each rank data of its own.")
    elif isinstance(sampler, DistributedSampler) and type(sampler) not in (DistributedSampler, SelDPSampler):
        rank_zero_warn(f"SelDP leaves the order to {type(sampler).__name__}; set partition='defdp' to say so.")
    return type(sampler) is DistributedSampler


def with_resumable_order(loader: DataLoader) -> DataLoader:
    """Returns ``loader`` in the same order, which can begin within an epoch if it is Lightning's own."""
    order = sampler_of(loader)
    if type(order) is not DistributedSampler or not counts_samples(loader):
        return loader
    return with_order(loader, resumable(order))


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
