"""What all codecs' kernels share: their launches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from lightning_pipesync.core.codecs.shards import Shards


class KernelShards(Shards):
    """Shards that Triton kernels encode and decode; see [Note: kernels]."""

    TILE: ClassVar[int] = 4096  #: values that one program works on
    #: A product and a sum, contracted to one instruction, would be rounded once instead of twice.
    OPTIONS: ClassVar[dict[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}

    def decode(self, wires: Tensor, flat: Tensor) -> None:
        self._decode(wires, flat, len(wires), 1)

    def sum(self, wires: Tensor, own: Tensor, divisor: int) -> None:
        self._decode(wires, own, 1, divisor)

    def sum_in_order(self, wires: Tensor, flat: Tensor, divisor: int) -> None:
        self.sum(wires, flat, divisor)  # a program adds the wires one after the other

    @abstractmethod
    def _decode(self, wires: Tensor, target: Tensor, shards: int, divisor: int) -> None:
        """Decodes to this many shards, each of which is the sum of as many wires over ``divisor``."""

    def _launch(self, kernel: Any, programs: int, shards: int, flat: Tensor, /, *args: Any, **constants: Any) -> None:
        """Launches ``kernel`` for ``flat``, with this many programs for each of the shards, on the current stream."""
        if programs * shards:
            with torch.cuda.device_of(flat):
                kernel[programs, shards](in_memory(flat), *args, **constants, **self.OPTIONS)

    def _tiles(self, numel: int) -> int:
        return triton.cdiv(numel, self.TILE)


def in_memory(values: Tensor) -> Tensor:
    """Returns a view that kernels take: int16 for bfloat16."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values
