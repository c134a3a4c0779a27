"""What a DataLoader is made of, and copies of it with another sampler or batch size."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_pipesync.core.torch_private import copy_loader
from lightning_pipesync.data.injection import adjusted_batch_size


class LoaderWrapper:
    """A wrapper of a loader, with the same length and attributes."""

    loader: Any

    def __len__(self) -> int:
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


def batch_size_before_injection(
    loader: DataLoader[Any], injection: tuple[float, float] | None, world_size: int
) -> int | None:
    """Returns the batch size of the loader before data injection adds rows (SelSync Eq. 3); None without injection."""
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
    """Returns a shallow copy of ``loader`` in the order of ``sampler``, with ``num_samples`` in a batch if given."""
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
    """Returns the batch size; 1 if the loader does not batch."""
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
