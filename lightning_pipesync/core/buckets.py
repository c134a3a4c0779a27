"""Tensor fusion: many tensors in one flat buffer, exchanged by one collective, and divided into shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.dtensors import LocalShard
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.sharding import copies_of, even_numel
from lightning_pipesync.core.torch_private import foreach_copy_, foreach_zero_, is_dtensor

MIB = 2**20

#: Maximum number of buckets of a gradient, of those sizes that are tried.
MOST_BUCKETS = 40
#: Alignment of each tensor in a flat buffer, in bytes, which is that of torch's own allocator. On some processors the
#: rounding of a matrix product depends on the alignment of its operands.
ALIGNMENT = 64


@dataclass(frozen=True)
class Fusion:
    """How tensors are fused: by size or by layers; with neither, every tensor has its own bucket.

    Attributes:
        bucket_mb: maximum bucket size in MiB (DeAR-FB). A larger tensor has its own bucket.
        edge_mb: maximum size in MiB of the first and of the last bucket. From both ends inwards buckets grow by a
            factor of up to 2, until ``bucket_mb``. None: all buckets have the same limit.
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
        """Splits parameters of one kind, see :func:`of_one_kind`, into buckets."""
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
        """Returns the maximum size in bytes of a bucket that starts after ``passed`` bytes, before ``left`` bytes."""
        if self.bucket_mb is None:
            return 0
        edge = (self.edge_mb or self.bucket_mb) * MIB
        return min(self.bucket_mb * MIB, passed + edge, max(edge, (left + edge) / 2))


def num_bytes(parameter: NamedParameter) -> int:
    """Returns the size of a parameter, or of an even share of it, so that all ranks of a replica fuse alike."""
    return even_numel(parameter.tensor) * parameter.tensor.element_size()


def plan_buckets(parameters: Sequence[NamedParameter], fusion: Fusion) -> list[list[NamedParameter]]:
    """Divides parameters into buckets; never across kinds, see :func:`of_one_kind`.

    Args:
        parameters: in the order in which their gradients become ready: an observed order, or else the reverse of
            :func:`collect_parameters` as an estimate.

    Returns:
        The buckets in the order in which they become ready, which is the order of their last members.
    """
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    plan = [bucket for kind in of_one_kind(parameters) for bucket in fusion.divide(kind)]
    return sorted(plan, key=lambda bucket: position[id(bucket[-1])])


def of_one_kind(parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
    """Groups the parameters by what a bucket must not mix.

    That is the dtype, the device, the optimizer's parameter group, the number of their copies, and whether they are
    shards, whose memory stays where it is.
    """
    kinds: dict[Hashable, list[NamedParameter]] = {}
    for parameter in parameters:
        tensor = parameter.tensor
        kind = (tensor.dtype, tensor.device, parameter.group, copies_of(tensor), isinstance(tensor, LocalShard))
        kinds.setdefault(kind, []).append(parameter)
    return list(kinds.values())


def buffer_reader(module: nn.Module) -> Callable[[], list[Tensor]]:
    """Returns a function that reads the module's current buffers, each once, also after it replaces them."""
    places: dict[int, tuple[nn.Module, str]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            places.setdefault(id(buffer), (owner, name))
    return lambda: [getattr(owner, name) for owner, name in places.values()]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps in the shape and memory format of ``tensor``."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def restore_memory_format(tensor: Tensor, strides: tuple[int, ...]) -> None:
    """Gives ``tensor`` memory with these strides, which are dense, unless it has them."""
    if tensor.stride() != strides:
        values = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor.data = values.copy_(tensor.detach())


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Returns a view of ``flat``, 1-D, in the shape and memory format of ``like``."""
    return flat.as_strided(like.shape, dense_strides(like))


def flattened(values: Tensor, like: Tensor) -> Tensor:
    """Returns ``values``, of the shape of ``like``, in the order of ``like`` in memory: 1-D, a view if possible."""
    strides = dense_strides(like)
    if values.stride() != strides:
        values = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)
    return values.as_strided((values.numel(),), (1,))


class Bucket:
    """A flat buffer for tensors of one dtype on one device.

    Each tensor starts at a multiple of :data:`ALIGNMENT` bytes. Packing zeroes the gaps between tensors: a value that
    is not finite may have spread to them in an earlier step, through a factor or a codec's scale.

    Attributes:
        flat: the buffer, 1-D.
        places: the slice of ``flat`` of each tensor.
        views: views of these slices in the tensors' shapes and memory formats, such as channels_last.

    Args:
        num_shards: into how many shards of one size the buffer divides with the room behind it, see
            :func:`zeros_with_room`: the number of ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], num_shards: int = 1) -> None:
        self.places: list[slice] = []
        end = 0
        step = ALIGNMENT // tensors[0].element_size()
        for tensor in tensors:
            self.places.append(slice(end, end + tensor.numel()))
            end += -(-tensor.numel() // step) * step
        with torch.inference_mode(False):  # a validation may be the first to need the buffer
            self.flat = zeros_with_room(end, num_shards, tensors[0].dtype, tensors[0].device)
        self._num_bytes = self.flat.untyped_storage().nbytes()  # with the room
        self._taken_on = self._present_stream()
        self.views = [shaped(self.flat[place], like=t) for place, t in zip(self.places, tensors, strict=True)]
        ends = [place.start for place in self.places[1:]] + [end]
        gaps = [self.flat[place.stop : next_start] for place, next_start in zip(self.places, ends, strict=True)]
        self._gaps = [gap for gap in gaps if gap.numel()]

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor]) -> None:
        foreach_copy_(self.views, list(tensors))
        self.zero_gaps()

    @torch.no_grad()
    def pack_gradients(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Copies the gradients of ``parameters`` into the buffer, zeros for None; returns which are not None."""
        pairs = [(v, p.grad) for v, p in zip(self.views, parameters, strict=True) if p.grad is not None]
        if len(pairs) < len(parameters):
            self.flat.zero_()
        else:
            self.zero_gaps()
        foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        return [parameter.grad is not None for parameter in parameters]

    def idle(self, present: Sequence[bool], margin: int) -> Tensor | None:
        """Returns True for the values of tensors that are not present, 1-D; None if all are.

        ``margin``: how many values at both ends of such a tensor are left out, see :attr:`Codec.reach`.
        """
        if all(present):
            return None
        mask = torch.zeros(self.flat.numel(), dtype=torch.bool, device=self.flat.device)
        for place, is_present in zip(self.places, present, strict=True):
            if not is_present:
                mask[place.start + margin : max(place.start + margin, place.stop - margin)] = True
        return mask

    @torch.no_grad()
    def zero_gaps(self) -> None:
        foreach_zero_(self._gaps)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        foreach_copy_(list(tensors), self.views)

    def release_memory(self) -> None:
        """Frees the memory of the buffer, which keeps its views, until :meth:`take_memory`.

        On a GPU the present stream has to follow all that uses the buffer. Then so does the stream on which the memory
        was taken, which may be given it for something else.
        """
        if self._taken_on is not None:
            self._taken_on.wait_stream(torch.cuda.current_stream(self.flat.device))
        self.flat.untyped_storage().resize_(0)

    def take_memory(self) -> None:
        """Gives the buffer memory again, with undefined values, if :meth:`release_memory` has freed it."""
        if not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self._num_bytes)
            self._taken_on = self._present_stream()

    def _present_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.flat.device) if self.flat.is_cuda else None


def shard_numel(numel: int, world_size: int) -> int:
    """Returns the number of values of a shard; the last shards may have fewer, or none."""
    return -(-numel // world_size)


def shard_slice(numel: int, rank: int, world_size: int) -> slice:
    """Returns the slice of a flat buffer of ``numel`` values that ``rank`` owns."""
    size = shard_numel(numel, world_size)
    return slice(min(rank * size, numel), min((rank + 1) * size, numel))


def shard_of(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns the slice of ``flat`` (1-D) that ``rank`` owns: a view."""
    return flat[shard_slice(flat.numel(), rank, world_size)]


def zeros_with_room(numel: int, num_shards: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns ``numel`` zeros, 1-D, and behind them room for up to ``num_shards - 1`` values.

    With it they divide into ``num_shards`` shards of one size, and into as many as any divisor of that number, such as
    the ranks of a row. It is marked in the storage, so that views that end with the last value have the room, too.
    """
    whole = torch.zeros(numel + -numel % num_shards, dtype=dtype, device=device)
    whole.untyped_storage().room_begins = numel * whole.element_size()  # type: ignore[attr-defined]
    return whole[:numel]


def with_room(flat: Tensor, numel: int) -> Tensor | None:
    """Returns a view of ``flat``, 1-D, and the room behind it, ``numel`` values in all; None without enough room.

    The values in the room are undefined: whoever reads them sets them before.
    """
    if numel == flat.numel():
        return flat
    storage, begin = flat.untyped_storage(), flat.storage_offset()
    values_end, end = ((begin + count) * flat.element_size() for count in (flat.numel(), numel))
    if getattr(storage, "room_begins", None) != values_end or end > storage.nbytes():
        return None
    return flat.as_strided((numel,), (1,))


def rows_of(flat: Tensor, number: int, size: int) -> Tensor:
    """Returns shards as rows, shape ``[number, size]``.

    It is a view if they are of one size, or there is room behind ``flat``; otherwise a copy padded with zeros.
    """
    padded = with_room(flat, number * size)
    if padded is None:
        padded = torch.nn.functional.pad(flat, (0, number * size - flat.numel()))
    return padded.view(number, size)


def copy_back(rows: Tensor, flat: Tensor) -> Tensor:
    """Copies ``rows`` to ``flat`` if :func:`rows_of` has made a copy of it; returns ``flat``."""
    return flat if with_room(flat, rows.numel()) is not None else flat.copy_(rows.view(-1)[: flat.numel()])


def unshare_storage(state: dict[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with a copy in place of each tensor that is a view of a larger buffer.

    Some file formats refuse tensors that share storage, as fused weights do. Tied weights stay tied.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    result = copy(state)  # keeps the attributes that torch sets on it
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_dtensor(value) or value.untyped_storage().nbytes() == value.nbytes:
            continue
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.clone()
        result[name] = copies[key]
    return result
