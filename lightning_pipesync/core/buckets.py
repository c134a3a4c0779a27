"""Tensor fusion: many tensors in one flat buffer, so that one operation serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_pipesync.compat import foreach_copy_
from lightning_pipesync.core.parameters import NamedParameter

MIB = 2**20


@dataclass(frozen=True)
class Fusion:
    """How tensors are fused: exactly one of the two may be set; with none, every tensor has a bucket of its own.

    Attributes:
        bucket_mb: a bucket is full when it holds this many MiB (DeAR-FB). A larger tensor has one to itself.
        num_layers: a bucket is full when it holds tensors of this many layers (DeAR-NL).

    Raises:
        ValueError: both are set, or a value is not positive.
    """

    bucket_mb: float | None = None
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and self.num_layers is not None:
            raise ValueError(f"Set bucket_mb={self.bucket_mb} or num_layers={self.num_layers}, not both.")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be a positive number of MiB, got {self.bucket_mb!r}.")
        if self.num_layers is not None and not self.num_layers >= 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers!r}.")

    def is_full(self, bucket: Sequence[NamedParameter], following: NamedParameter) -> bool:
        """Returns whether ``following`` has to go into a bucket after ``bucket``."""
        if self.bucket_mb is not None:
            return sum(num_bytes(parameter) for parameter in [*bucket, following]) > self.bucket_mb * MIB
        if self.num_layers is not None:
            return len({parameter.layer for parameter in [*bucket, following]}) > self.num_layers
        return bool(bucket)


def num_bytes(parameter: NamedParameter) -> int:
    """Returns the size of the parameter in bytes."""
    return parameter.tensor.numel() * parameter.tensor.element_size()


def plan_buckets(parameters: Sequence[NamedParameter], fusion: Fusion) -> list[list[NamedParameter]]:
    """Divides parameters into buckets; never across dtype, device or optimizer parameter group.

    Args:
        parameters: in the order in which their gradients become ready: the reverse of :func:`collect_parameters` is
            a good guess, an order that was observed is better.
        fusion: when a bucket is full.

    Returns:
        The buckets in the order in which they become ready, that of their last members.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device, tuple[int, int] | None], list[int]] = {}
    closed: list[list[int]] = []
    for index, parameter in enumerate(parameters):
        key = (parameter.tensor.dtype, parameter.tensor.device, parameter.group)
        bucket = open_buckets.setdefault(key, [])
        if bucket and fusion.is_full([parameters[member] for member in bucket], parameter):
            closed.append(bucket)
            bucket = open_buckets[key] = []
        bucket.append(index)
    closed += open_buckets.values()
    return [[parameters[index] for index in bucket] for bucket in sorted(closed, key=lambda bucket: bucket[-1])]


def buffer_reader(module: nn.Module) -> Callable[[], list[Tensor]]:
    """Returns what reads the module's buffers, each once, also when the module has replaced them by new tensors."""
    places: dict[int, tuple[nn.Module, str]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            places.setdefault(id(buffer), (owner, name))
    return lambda: [getattr(owner, name) for owner, name in places.values()]


class Bucket:
    """A flat buffer with a place for each of some tensors of one dtype on one device.

    Attributes:
        flat: the buffer, 1-D, ``sum of the numels`` values.
        views: for each tensor its place in ``flat``, in its shape.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        self.flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
        self.views = [p.view(t.shape) for p, t in zip(self.flat.split(sizes), tensors, strict=True)]

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor]) -> None:
        """Copies ``tensors`` into the buffer."""
        foreach_copy_(self.views, list(tensors))

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copies the buffer into ``tensors``."""
        foreach_copy_(list(tensors), self.views)
