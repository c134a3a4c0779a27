"""Applies a method's data settings to training loaders that a framework creates."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_pipesync.data.loaders import (
    batch_size_before_injection,
    counts_samples,
    resumable,
    sampler_of,
    with_order,
    with_seldp,
)
from lightning_pipesync.data.seldp import SelDPSampler
from lightning_pipesync.methods.settings import Settings


def in_order(
    loader: DataLoader[Any],
    settings: Settings,
    order: DistributedSampler[Any] | None,
    world_size: int,
    limit: int | float = 1.0,
) -> DataLoader[Any]:
    """Returns ``loader`` in the order of SelDP and with the batch size of data injection, if these are set.

    Args:
        loader: the framework's loader.
        settings: the method's settings.
        order: the sampler that SelDP may replace; None: the order is the user's own.
        world_size: number of ranks.
        limit: how much of the loader is used in an epoch: a number of batches, or a fraction.

    Raises:
        ValueError: data injection is set and the loader has no batches.
    """
    samples = batch_size_before_injection(loader, settings.injection, world_size)
    if settings.partition == "seldp" and order is not None:
        return with_seldp(loader, order, full_pass=settings.full_pass, num_samples=samples, limit=limit)
    return loader if samples is None else with_order(loader, sampler_of(loader), samples)


def replaceable_order(loader: DataLoader[Any], settings: Settings, rank: int) -> DistributedSampler[Any] | None:
    """Returns the framework's own sampler of ``loader``, which SelDP may replace; None: the order is the user's own.

    Iterable data sets and other samplers keep their order; rank 0 warns if ``partition="seldp"``.
    """
    sampler = sampler_of(loader)
    if type(sampler) is DistributedSampler and not isinstance(loader.dataset, IterableDataset):
        return sampler
    if settings.partition != "seldp" or rank != 0:
        return None
    if isinstance(loader.dataset, IterableDataset):
        warnings.warn(
            "SelDP cannot reorder an iterable data set; it must itself give each rank different data.", stacklevel=2
        )
    elif isinstance(sampler, DistributedSampler) and type(sampler) is not SelDPSampler:
        warnings.warn(
            f"SelDP does not replace a {type(sampler).__name__}; set partition='defdp' to silence this.", stacklevel=2
        )
    return None


def check_num_samples(loader: DataLoader[Any], world_size: int) -> None:
    """Checks that there is at least one sample for each rank, if the data is divided among the ranks.

    Raises:
        ValueError: there are fewer samples than ranks.
    """
    sampler = sampler_of(loader)
    if not isinstance(sampler, DistributedSampler):
        return
    num_samples = len(sampler.dataset)  # type: ignore[arg-type]
    if num_samples < world_size:
        raise ValueError(f"The training data set has {num_samples} samples, too few for {world_size} ranks.")


def with_resumable_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns ``loader`` in the same order; if that is the framework's own, it can resume within an epoch."""
    order = sampler_of(loader)
    if type(order) is not DistributedSampler or not counts_samples(loader):
        return loader
    return with_order(loader, resumable(order))
