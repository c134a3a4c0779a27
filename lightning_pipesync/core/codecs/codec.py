"""The interface of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """A wire format of floating-point values.

    A wire format is never summed: receivers decode and sum in fp32. A codec holds no state between calls, may be used
    from several threads at once, is deterministic, and never makes the host wait for a device. In all methods

    - `source`, `target` and `accumulator` are contiguous, in fp32, fp64, bf16 or fp16, of the same number of values (0
      is fine), and need no gradient: shape `[numel]`, or `[rows, numel]`, where each row is encoded by itself;
    - `wire` is uint8 of exactly `wire_bytes` bytes, or rows of them: shape `[wire_bytes]` or `[rows, wire_bytes]`. It,
      and each row, starts at a multiple of 16 bytes in its storage;
    - `dtype` is that of the source, which may differ from the target's (bf16 gradients are summed in fp32).

    A NaN or an infinity in the source decodes to a NaN or an infinity, not always the same one. Except with `none`, an
    fp64 value beyond the range of fp32 counts as an infinity.
    """

    name: ClassVar[str]  #: what ``compression`` calls it
    lossless: ClassVar[bool] = False  #: whether decoded values are the encoded ones
    sparse: ClassVar[bool] = False  #: whether most values are dropped, so that error feedback has most of a gradient
    #: Whether an all-reduce gathers what each rank has encoded, which all decode and sum: values are encoded once.
    #: Otherwise each rank sums a shard, which is encoded again to be gathered. A sum of sparse values is less sparse.
    gathered: ClassVar[bool] = False
    #: How far from a value that is not zero a zero may decode to something else.
    reach: ClassVar[int] = 0

    @abstractmethod
    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Returns the exact size in bytes of `numel` encoded values of `dtype`.

        Raises:
            ValueError: this codec cannot encode such values.
        """

    @abstractmethod
    def encode(self, source: Tensor, wire: Tensor) -> None:
        """Writes `source` to `wire`."""

    @abstractmethod
    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        """Overwrites `target` with the values of `wire`."""

    @abstractmethod
    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype, alpha: float = 1) -> None:
        """Adds `alpha` times the values of `wire`: for an fp32 `accumulator`, bit for bit `decode` and then `add_`."""

    def __repr__(self) -> str:
        """Returns the same text in every process: the ranks compare their settings by it."""
        return f"{type(self).__name__}()"

    def _require_floating_point(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise ValueError(
                f"compression={self.name!r} encodes floating-point values, not {dtype}: use compression='none'"
            )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of ``dtype`` are summed: fp32 for 16-bit floats, else ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
