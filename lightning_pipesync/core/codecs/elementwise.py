"""Codecs that send one element for each value: none, bf16, fp16, truncate16."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.codecs.blocks import addend, as_dtype, blocks
from lightning_pipesync.core.codecs.codec import Codec


class _Elementwise(Codec):
    """One element of another dtype for each value."""

    @abstractmethod
    def element(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype on the wire for values of `dtype`."""

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self.element(dtype).itemsize

    def encode(self, source: Tensor, wire: Tensor) -> None:
        wire.view(self.element(source.dtype)).copy_(source)

    def decode(self, wire: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        target.copy_(wire.view(self.element(dtype)))

    def decode_add(self, wire: Tensor, accumulator: Tensor, dtype: torch.dtype, alpha: float = 1) -> None:
        elements = wire.view(self.element(dtype))
        for block in blocks(accumulator):
            accumulator[..., block].add_(addend(elements[..., block], accumulator.dtype), alpha=alpha)


class NoCompression(_Elementwise):
    """The raw bytes of the source, which may be of any integer dtype too."""

    name = "none"
    lossless = True

    def element(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class _Cast(_Elementwise):
    """A cast to a 16-bit floating-point dtype, rounded to nearest."""

    cast: ClassVar[torch.dtype]

    def element(self, dtype: torch.dtype) -> torch.dtype:
        self._require_floating_point(dtype)
        return self.cast


class BF16(_Cast):
    """bfloat16: relative error at most 2^-8 over the range of fp32, but for its last 0.2%, which becomes infinity."""

    name = "bf16"
    cast = torch.bfloat16


class FP16(_Cast):
    """IEEE half precision: relative error at most 2^-11 from 6.1e-5 to 65504; from 65520 on it is infinity."""

    name = "fp16"
    cast = torch.float16


class Truncate16(_Cast):
    """The 16 high bits of the value as fp32, so rounded toward zero; relative error below 2^-7 (Pipe-SGD, Compression).

    The result is a bfloat16. A NaN whose payload is in the dropped bits alone becomes an infinity.
    """

    name = "truncate16"
    cast = torch.bfloat16

    def encode(self, source: Tensor, wire: Tensor) -> None:
        high_halves = wire.view(torch.int16)
        for block in blocks(source):
            values = as_dtype(source[..., block], torch.float32)
            # Every processor that torch is built for is little endian: the high half is the second.
            high_halves[..., block].copy_(values.view(torch.int16)[..., 1::2])
