"""Cache-sized blocks and their scratch memory.

[Note: scratch] Operations of several passes work block by block, so that all passes but the first find the block in
cache. The scratch is thread local, because a compute thread and a communication thread use one codec object at once,
and it is kept between calls. On other devices a call is one block, whose scratch comes from the caching allocator,
which knows of streams: a second stream would overwrite a kept buffer while the first still reads it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK_PER_THREAD = 2**17
"""Values of a block per CPU thread, which fit its cache: 512 KiB in fp32."""
ALIGNMENT = 1024
"""Blocks begin at multiples of it: at chunks of every codec."""


def works_in_blocks(values: Tensor) -> bool:
    """Returns whether operations on `values` divide them: on other devices than the CPU each block costs launches."""
    return values.device.type == "cpu"


def blocks(values: Tensor) -> Iterator[slice]:
    """Yields the slices of the blocks of `values`, of its last dimension, see [Note: scratch]."""
    numel = values.shape[-1]
    size = max(numel, 1)
    if works_in_blocks(values):
        rows = max(1, values.shape[:-1].numel())
        size = max(1, BLOCK_PER_THREAD * torch.get_num_threads() // (rows * ALIGNMENT)) * ALIGNMENT
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


class _Kept(threading.local):
    """Buffers by their dtype, and the view of each that was asked for last: views take longer than small blocks."""

    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.views: dict[torch.dtype, Tensor] = {}


_kept = _Kept()


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns uninitialized scratch for one block, valid until this thread asks for the same dtype again."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    view = _kept.views.get(dtype)
    if view is None or view.shape != shape:
        numel, buffer = math.prod(shape), _kept.buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = _kept.buffers[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        view = _kept.views[dtype] = buffer[:numel].view(shape)
    return view


def as_dtype(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `block` itself if it has that dtype, else a copy of it in scratch."""
    return block if block.dtype == dtype else scratch(block.shape, dtype, block.device).copy_(block)


def addend(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `block` to be added to values of `dtype`.

    On the CPU, adding bf16 to fp32 in one call is some 50 times slower than a copy to fp32 and an add.
    """
    return as_dtype(block, dtype) if works_in_blocks(block) else block
