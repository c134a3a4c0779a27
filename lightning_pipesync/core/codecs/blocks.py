"""Cache-sized blocks and their scratch memory.

[Note: scratch] Operations of several passes work block by block, so that all passes but the first find the block in
cache. The scratch is thread local, because a compute thread and a communication thread use one codec object at once,
and it is kept between calls. On other devices a call is one block, whose scratch comes from the caching allocator,
which knows of streams: a second stream would overwrite a kept buffer while the first still reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_PER_THREAD = 2**17
"""Values of a block per CPU thread, which fit its cache: 512 KiB in fp32. A multiple of `Int8.CHUNK`."""


def works_in_blocks(values: Tensor) -> bool:
    """Returns whether operations on `values` divide them: on other devices than the CPU each block costs launches."""
    return values.device.type == "cpu"


def blocks(values: Tensor) -> Iterator[slice]:
    """Yields the slices of the blocks of `values`, of its last dimension, see [Note: scratch]."""
    numel = values.shape[-1]
    size = BLOCK_PER_THREAD * torch.get_num_threads() if works_in_blocks(values) else max(numel, 1)
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


class _KeptBuffers(threading.local):
    def __init__(self) -> None:
        self.of_dtype: dict[torch.dtype, Tensor] = {}


_kept_buffers = _KeptBuffers()


def scratch(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns uninitialized scratch for one block, valid until this thread asks for the same dtype again."""
    if block.device.type != "cpu":
        return torch.empty(block.shape, dtype=dtype, device=block.device)
    buffer = _kept_buffers.of_dtype.get(dtype)
    if buffer is None or buffer.numel() < block.numel():
        buffer = _kept_buffers.of_dtype[dtype] = torch.empty(block.numel(), dtype=dtype)
    return buffer[: block.numel()].view(block.shape)


def as_dtype(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `block` itself if it has that dtype, else a copy of it in scratch."""
    return block if block.dtype == dtype else scratch(block, dtype).copy_(block)


def addend(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `block` to be added to values of `dtype`.

    On the CPU, adding bf16 to fp32 in one call is some 50 times slower than a copy to fp32 and an add.
    """
    return as_dtype(block, dtype) if works_in_blocks(block) else block
