"""Tensor fusion: many tensors in one flat buffer, so that one operation serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import foreach_copy_, foreach_zero_

MIB = 2**20
#: Where a tensor in a flat buffer may begin, in bytes from its start. Matrix products of some processors round by how
#: their operands lie in memory; torch's own allocator places tensors on such boundaries, too.
ALIGNMENT = 64


@dataclass(frozen=True)
class Fusion:
    """How tensors are fused: by size or by layers; with neither, every tensor has a bucket of its own.

    Attributes:
        bucket_mb: a bucket holds up to this many MiB (DeAR-FB). A larger tensor has one to itself.
        edge_mb: the first and the last bucket hold up to this many MiB, and those between up to twice as many as their
            neighbor towards the end, until ``bucket_mb`` is reached; None: all are alike.
        num_layers: a bucket holds the tensors of this many layers (DeAR-NL).

    Raises:
        ValueError: both a size and a number of layers are set, or a value is out of its range.
    """

    bucket_mb: float | None = None
    edge_mb: float | None = None
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and self.num_layers is not None:
            raise ValueError(f"Set bucket_mb={self.bucket_mb} or num_layers={self.num_layers}, not both.")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be a positive number of MiB, got {self.bucket_mb!r}.")
        if self.edge_mb is not None and not 0 < self.edge_mb <= (self.bucket_mb or 0):
            raise ValueError(
                f"edge_mb must be a positive number of MiB, bucket_mb={self.bucket_mb!r} at most, got {self.edge_mb!r}."
            )
        if self.num_layers is not None and not self.num_layers >= 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers!r}.")

    def divide(self, parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
        """Cuts a sequence of parameters that may travel together into buckets."""
        left = sum(num_bytes(parameter) for parameter in parameters)
        buckets: list[list[NamedParameter]] = []
        capacity, filled, passed = 0.0, 0, 0
        layers: set[str] = set()
        for parameter in parameters:
            size = num_bytes(parameter)
            if self.num_layers is None:
                full = filled + size > capacity
            else:
                full = len(layers | {parameter.layer}) > self.num_layers
            if full or not buckets:
                buckets.append([])
                capacity, filled, layers = self._capacity(passed, left), 0, set()
            buckets[-1].append(parameter)
            layers.add(parameter.layer)
            filled, passed, left = filled + size, passed + size, left - size
        return buckets

    def _capacity(self, passed: int, left: int) -> float:
        """Returns the bytes of a bucket before which, and from which on, there are so many bytes."""
        if self.bucket_mb is None:
            return 0
        edge = (self.edge_mb or self.bucket_mb) * MIB
        return min(self.bucket_mb * MIB, passed + edge, max(edge, (left + edge) / 2))


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
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    plan = [bucket for kind in of_one_kind(parameters) for bucket in fusion.divide(kind)]
    return sorted(plan, key=lambda bucket: position[id(bucket[-1])])


def of_one_kind(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    """Returns the parameters by what must not be mixed in a bucket: dtype, device, optimizer parameter group."""
    kinds: dict[tuple[torch.dtype, torch.device, tuple[int, int] | None], list[NamedParameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.tensor.dtype, parameter.tensor.device, parameter.group), []).append(parameter)
    return list(kinds.values())


def buffer_reader(module: nn.Module) -> Callable[[], list[Tensor]]:
    """Returns what reads the module's buffers, each once, also when the module has replaced them by new tensors."""
    places: dict[int, tuple[nn.Module, str]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            places.setdefault(id(buffer), (owner, name))
    return lambda: [getattr(owner, name) for owner, name in places.values()]


class Bucket:
    """A flat buffer with a place for each of some tensors of one dtype on one device.

    Every place begins at a multiple of :data:`ALIGNMENT` bytes. Whenever tensors are packed, the gaps between them hold
    zeros: what is not finite in one step may have spread to them, by way of a factor or of a codec's scale.

    Args:
        tensors: what the places are for.
        strided: whether a place has the tensor's memory format, too, as the gradient of one in channels_last has.

    Attributes:
        flat: the buffer, 1-D.
        places: for each tensor which values of ``flat`` are its own.
        views: these values, in the tensor's shape.
    """

    def __init__(self, tensors: Sequence[Tensor], strided: bool = False) -> None:
        self.places, end = _places(tensors)
        self.flat = torch.zeros(end, dtype=tensors[0].dtype, device=tensors[0].device)
        self.views = [self.flat[place].view(t.shape) for place, t in zip(self.places, tensors, strict=True)]
        ends = [place.start for place in self.places[1:]] + [end]
        gaps = [self.flat[place.stop : next_start] for place, next_start in zip(self.places, ends, strict=True)]
        self._gaps = [gap for gap in gaps if gap.numel()]
        if strided:
            strides = [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]
            self.views = [view.as_strided(view.shape, s) for view, s in zip(self.views, strides, strict=True)]

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor]) -> None:
        """Copies ``tensors`` into the buffer."""
        foreach_copy_(self.views, list(tensors))
        foreach_zero_(self._gaps)

    @torch.no_grad()
    def pack_gradients(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Copies the gradients of ``parameters`` into the buffer, zero for one that is missing; returns which exist."""
        pairs = [(v, p.grad) for v, p in zip(self.views, parameters, strict=True) if p.grad is not None]
        if len(pairs) < len(parameters):
            self.flat.zero_()
        else:
            foreach_zero_(self._gaps)
        foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        return [parameter.grad is not None for parameter in parameters]

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copies the buffer into ``tensors``."""
        foreach_copy_(list(tensors), self.views)


def _places(tensors: Sequence[Tensor]) -> tuple[list[slice], int]:
    """Returns where in a flat buffer each tensor's values are, and how many values the buffer has."""
    places, end = [], 0
    step = ALIGNMENT // tensors[0].element_size()
    for tensor in tensors:
        places.append(slice(end, end + tensor.numel()))
        end += -(-tensor.numel() // step) * step
    return places, end


def shard_numel(numel: int, world_size: int) -> int:
    """Returns the number of values of every shard but the last ones, which may be shorter or empty."""
    return -(-numel // world_size)


def shard_slice(numel: int, rank: int, world_size: int) -> slice:
    """Returns which of ``numel`` values ``rank`` owns."""
    size = shard_numel(numel, world_size)
    return slice(min(rank * size, numel), min((rank + 1) * size, numel))


def shard_of(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns the slice of ``flat`` (1-D) that ``rank`` owns: a view."""
    return flat[shard_slice(flat.numel(), rank, world_size)]
