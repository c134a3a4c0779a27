"""The shards of a flat buffer through a codec, all of them in one call."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import copy_back, rows_of, with_room
from lightning_pipesync.core.codecs.codec import Codec, accumulation_dtype
from lightning_pipesync.core.codecs.elementwise import BF16
from lightning_pipesync.core.extras import is_installed
from lightning_pipesync.core.feedback import encode_with_feedback
from lightning_pipesync.core.torch_private import foreach_zero_


class Shards:
    """Shards of ``size`` values, each with a wire of its own, by the torch operations of a codec.

    The buffers hold the values of some shards in a row, of which the last may be shorter or empty. Such a shard is
    encoded as if zeros followed.

    Args:
        codec: encodes each of them.
        size: values of a shard.
        like: a tensor of the dtype and on the device of the buffers.
    """

    def __init__(self, codec: Codec, size: int, like: Tensor) -> None:
        self.codec, self.size, self.dtype, self.device = codec, size, like.dtype, like.device
        self.wire_bytes = codec.wire_bytes(size, like.dtype)

    def wires(self, number: int) -> Tensor:
        """Returns uninitialized wires, uint8 of shape ``[number, bytes]``.

        The bytes are a multiple of 16, so that each wire is aligned for any dtype, and never 0.
        """
        row_bytes = max(1, -(-self.wire_bytes // 16)) * 16
        return torch.empty(number, row_bytes, dtype=torch.uint8, device=self.device)

    def encode(self, flat: Tensor, wires: Tensor, residual: Tensor | None) -> None:
        """Encodes each shard of ``flat`` to its wire, see :func:`encode_with_feedback`; ``flat`` may change."""
        if not self.codec.lossless:
            self._zero_padding(len(wires), flat, residual)
        rows = rows_of(flat, len(wires), self.size)
        residuals = None if residual is None else rows_of(residual, len(wires), self.size)
        encode_with_feedback(self.codec, rows, self._used(wires), residuals)
        if residual is not None and residuals is not None:
            copy_back(residuals, residual)

    def decode(self, wires: Tensor, flat: Tensor) -> None:
        """Overwrites each shard of ``flat`` with the values of its wire."""
        rows = rows_of(flat, len(wires), self.size)
        self.codec.decode(self._used(wires), rows, self.dtype)
        copy_back(rows, flat)

    def sum(self, wires: Tensor, own: Tensor, divisor: int) -> None:
        """Overwrites one shard with the sum of all wires over ``divisor``, computed in fp32 for 16-bit floats."""
        decoded = torch.empty(len(wires), self.size, dtype=accumulation_dtype(self.dtype), device=self.device)
        self.codec.decode(self._used(wires), decoded, self.dtype)
        total = decoded.sum(dim=0)
        if divisor > 1:
            total.div_(divisor)
        own.copy_(total[: own.numel()])

    def sum_in_order(self, wires: Tensor, flat: Tensor, divisor: int) -> None:
        """Overwrites values with the sum of all wires over ``divisor``, as :meth:`sum`, added one after the other.

        Where every rank sums, not the owner of a shard alone, all devices must round alike, whatever their kind.
        """
        dtype = accumulation_dtype(self.dtype)
        total = flat if flat.dtype == dtype else torch.empty_like(flat, dtype=dtype)
        first, *others = self._used(wires)
        self.codec.decode(first, total, self.dtype)
        for wire in others:
            self.codec.decode_add(wire, total, self.dtype)
        if divisor > 1:
            total.div_(total.new_full((), divisor))  # by a number, CUDA would multiply by its reciprocal
        if total is not flat:
            flat.copy_(total)

    def _used(self, wires: Tensor) -> Tensor:
        return wires[:, : self.wire_bytes]

    def _zero_padding(self, number: int, *flats: Tensor | None) -> None:
        """Zeroes the room behind buffers, which decides about scales and what top-k keeps."""
        padded = [(flat.numel(), with_room(flat, number * self.size)) for flat in flats if flat is not None]
        foreach_zero_([whole[numel:] for numel, whole in padded if whole is not None and whole.numel() > numel])


def shards_of(codec: Codec, size: int, like: Tensor) -> Shards:
    """Returns the shards of buffers ``like`` this one: by Triton kernels where there are some, for fewer launches."""
    if like.dtype in (torch.float32, torch.bfloat16, torch.float16) and runs_triton(like):
        # Triton is imported here, so that only a process that uses it waits for that.
        from lightning_pipesync.core.codecs.kernels import KERNELS

        return KERNELS.get(type(codec), Shards)(codec, size, like)
    return Shards(codec, size, like)


def runs_triton(tensor: Tensor) -> bool:
    """Returns whether Triton compiles for the device of ``tensor``: from compute capability 8 on."""
    return (
        tensor.is_cuda
        and _is_installed("triton")
        and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
        and compiles_on(tensor.device)
    )


_is_installed = cache(is_installed)


@cache
def compiles_on(device: torch.device) -> bool:
    """Returns whether a first kernel can be launched; otherwise warns. Ranks that can and that cannot fit together."""
    from lightning_pipesync.core.codecs.kernels.elementwise import ElementwiseShards

    value = torch.zeros(1, device=device)
    shards = ElementwiseShards(BF16(), 1, value)
    try:
        shards.encode(value, shards.wires(1), None)
    except Exception as error:
        warnings.warn(
            f"Triton cannot compile on {device}, which takes a C compiler and Python's header files: codecs use torch "
            f"operations, with many more kernel launches. {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True
