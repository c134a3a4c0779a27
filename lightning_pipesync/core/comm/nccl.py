"""Reduce-scatter and all-gather over NCCL, on a side stream, without a host synchronization."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_numel, shard_of
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.comm.gloo import Between
from lightning_pipesync.core.feedback import ErrorFeedback, encode_with_feedback
from lightning_pipesync.core.torch_private import foreach_copy_


class NcclExchange:
    """:class:`GlooExchange` for flat CUDA tensors over an NCCL process group.

    All operations are enqueued on one side stream, in the order of the calls. An operation starts after the work that
    is on the caller's stream at the call; waiting for it makes the caller's stream wait, never the host.

    Args:
        group: an NCCL process group that nothing else uses.
        device: this rank's CUDA device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._stream = torch.cuda.Stream(device)

    def reduce_scatter(
        self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        return self._enqueue(flat, lambda: self._reduce_scatter(flat, codec, mean, feedback), feedback)

    def all_gather(
        self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None, part: slice | None = None
    ) -> Callable[[], Tensor]:
        if part is not None:
            return self._enqueue(flat, lambda: self._gather_parts(flat, part))
        return self._enqueue(flat, lambda: self._all_gather(flat, codec, feedback), feedback)

    def all_reduce(
        self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None, between: Between | None = None
    ) -> Callable[[], Tensor]:
        def both() -> Tensor:
            own = self._reduce_scatter(flat, codec, mean, feedback)
            if between is not None:
                between(own)
            return self._all_gather(flat, codec, feedback)

        return self._enqueue(flat, both, feedback)

    def broadcast(self, flat: Tensor, src: int) -> Callable[[], Tensor]:
        """Copies rank ``src``'s ``flat`` to all ranks; returns a function that waits for it."""

        def copy() -> Tensor:
            dist.broadcast(flat.view(torch.uint8), src, group=self._group)
            return flat

        return self._enqueue(flat, copy)

    def release_memory(self) -> None:
        pass  # no buffer is kept

    def _enqueue(
        self, flat: Tensor, operation: Callable[[], Tensor], feedback: ErrorFeedback | None = None
    ) -> Callable[[], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = operation()
            done = self._stream.record_event()
        residuals = [] if feedback is None else [feedback.contribution, feedback.shard]
        for tensor in (flat, *residuals):
            tensor.record_stream(self._stream)  # the allocator must not reuse its memory before this stream is done

        def wait() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(done)
            return result

        return wait

    def _reduce_scatter(self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None) -> Tensor:
        own = shard_of(flat, self._rank, self._world_size)
        if codec.lossless and accumulation_dtype(flat.dtype) == flat.dtype:
            padded = self._padded(flat)
            total = torch.empty(shard_numel(flat.numel(), self._world_size), dtype=flat.dtype, device=flat.device)
            dist.reduce_scatter_tensor(total, padded, group=self._group)
        else:  # NCCL would sum 16-bit floats in 16 bits, and wire formats as bytes
            total = self._exchange_and_sum(flat, codec, feedback)
        if mean:
            total.div_(self._world_size)
        return own.copy_(total[: own.numel()])

    def _exchange_and_sum(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> Tensor:
        size = shard_numel(flat.numel(), self._world_size)
        slices = self._padded(flat).view(self._world_size, size)
        num_bytes = codec.wire_bytes(size, flat.dtype)
        sent = self._wires(num_bytes)
        residuals: list[Tensor | None] = [None] * self._world_size
        if feedback is not None:
            padded = self._padded(feedback.contribution)
            residuals = list(padded.view(self._world_size, size))
        for source, wire, residual in zip(slices, sent, residuals, strict=True):
            encode_with_feedback(codec, source, wire[:num_bytes], residual)
        if feedback is not None and padded is not feedback.contribution:
            feedback.contribution.copy_(padded[: feedback.contribution.numel()])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        total = torch.zeros(size, dtype=accumulation_dtype(flat.dtype), device=flat.device)
        for wire in received:
            codec.decode_add(wire[:num_bytes], total, flat.dtype)
        return total

    def _all_gather(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> Tensor:
        size = shard_numel(flat.numel(), self._world_size)
        own = shard_of(self._padded(flat), self._rank, self._world_size)
        if codec.lossless:
            gathered = torch.empty(self._world_size * size, dtype=flat.dtype, device=flat.device)
            dist.all_gather_into_tensor(gathered, own, group=self._group)
            return flat.copy_(gathered[: flat.numel()])
        num_bytes = codec.wire_bytes(size, flat.dtype)
        wires = self._wires(num_bytes)
        wire = torch.empty_like(wires[0])
        encode_with_feedback(codec, own, wire[:num_bytes], None if feedback is None else feedback.shard)
        dist.all_gather_into_tensor(wires.view(-1), wire, group=self._group)
        decoded = torch.empty(self._world_size, size, dtype=flat.dtype, device=flat.device)
        for encoded, target in zip(wires, decoded, strict=True):
            codec.decode(encoded[:num_bytes], target, flat.dtype)
        return flat.copy_(decoded.view(-1)[: flat.numel()])

    def _gather_parts(self, flat: Tensor, part: slice) -> Tensor:
        parts = [shard_of(flat, rank, self._world_size)[part] for rank in range(self._world_size)]
        size = parts[0].numel()  # the last ranks' parts may be shorter
        own = torch.nn.functional.pad(parts[self._rank], (0, size - parts[self._rank].numel()))
        gathered = torch.empty(self._world_size, size, dtype=flat.dtype, device=flat.device)
        dist.all_gather_into_tensor(gathered.view(-1), own, group=self._group)
        foreach_copy_(parts, [row[: values.numel()] for row, values in zip(gathered, parts, strict=True)])
        return flat

    def _wires(self, num_bytes: int) -> Tensor:
        """Returns a buffer with a row per rank, each aligned for any dtype, also where nothing is to be sent."""
        row_bytes = max(1, -(-num_bytes // 16)) * 16  # rows of no bytes would begin at odd offsets
        return torch.empty(self._world_size, row_bytes, dtype=torch.uint8, device=self._device)

    def _padded(self, flat: Tensor) -> Tensor:
        """Returns ``flat`` if its size is a multiple of the number of ranks, else a copy padded with zeros."""
        missing = shard_numel(flat.numel(), self._world_size) * self._world_size - flat.numel()
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
