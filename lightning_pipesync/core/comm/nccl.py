"""Reduce-scatter and all-gather over NCCL, on a side stream, without a host synchronization."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import copy_back, rows_of, shard_numel, shard_of, with_room
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.codecs.shards import Shards, shards_of
from lightning_pipesync.core.comm.gloo import ShardHook, mean_in_order
from lightning_pipesync.core.feedback import ErrorFeedback, kept

#: Of streams of communication: their kernels are few and short, and training would otherwise delay them.
HIGH_PRIORITY = -1
#: The most thread blocks of a kernel between hosts, each of which takes a multiprocessor from training.
MAX_CTAS = 4


def reduce_scatter_single(output: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``torch.distributed.reduce_scatter_single``, which is ``reduce_scatter_tensor`` before torch 2.13."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, flat, group=group)


def all_gather_single(output: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``torch.distributed.all_gather_single``, which is ``all_gather_into_tensor`` before torch 2.13."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, own, group=group)


def new_nccl_group(
    ranks: list[int] | None, device: torch.device, timeout: timedelta, several_hosts: bool
) -> dist.ProcessGroup:
    """Returns a process group of ``ranks``, all if None; a collective call of all ranks.

    ``several_hosts``: whether they are on several; then kernels have at most :data:`MAX_CTAS` thread blocks, unless
    ``NCCL_MIN_CTAS`` or ``NCCL_MAX_CTAS`` is set.
    """
    # A default group that is bound to its device is split, which must not meet work in flight.
    torch.cuda.synchronize(device)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    config = getattr(options, "config", None)  # torch may be built with an NCCL that has none
    if several_hosts and config is not None and not os.environ.keys() & {"NCCL_MIN_CTAS", "NCCL_MAX_CTAS"}:
        config.max_ctas = MAX_CTAS
    return dist.new_group(ranks, backend="nccl", timeout=timeout, pg_options=options)


def destroy_nccl_groups(groups: Sequence[dist.ProcessGroup], abort: bool) -> None:
    """Destroys NCCL's groups; may block for as long as a kernel waits for a peer.

    With ``abort``, which is for after an error, kernels in flight end at once. All groups are aborted together: the
    abort of one communicator may wait for another (pytorch/pytorch#119797).
    """
    if abort:
        with suppress(Exception):  # a communicator that has failed may raise its error again
            backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in groups]
            backends[0]._group_start()
            for backend in backends:
                backend.abort()
            backends[0]._group_end()
    for group in groups:
        with suppress(Exception):
            dist.destroy_process_group(group)


class NcclExchange:
    """:class:`GlooExchange` for flat CUDA tensors over an NCCL process group.

    All operations are enqueued on one side stream, in the order of the calls. An operation starts after the work that
    is on the caller's stream at the call; waiting for it makes the caller's stream wait, never the host. All ranks'
    shards are encoded and decoded in one call, so that the number of kernels does not depend on the number of ranks;
    collectives work in place where the shards are of one size, or there is room behind the values, see :mod:`.room`.

    Args:
        group: an NCCL process group that nothing else uses.
        device: this rank's CUDA device.
        sums_wide: whether NCCL sums 16-bit floats, as fp32, in a ring. Otherwise every rank sends every other its part
            in 16 bits: half the bytes where each rank has a link of its own, and several times as many over a link that
            the ranks of a host share.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sums_wide: bool = False) -> None:
        self._group, self._device, self.sums_wide = group, device, sums_wide
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

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
        self,
        flat: Tensor,
        codec: Codec,
        mean: bool,
        feedback: ErrorFeedback | None,
        shard_hook: ShardHook | None = None,
    ) -> Callable[[], Tensor]:
        def both() -> Tensor:
            if codec.gathered:
                assert shard_hook is None
                return self._sum_of_gathered(flat, codec, mean, feedback)
            if shard_hook is None and self._sums(flat, codec):
                total = flat.to(accumulation_dtype(flat.dtype))
                dist.all_reduce(total, group=self._group)
                if mean:
                    total.div_(self._world_size)
                return flat if total is flat else flat.copy_(total)
            own = self._reduce_scatter(flat, codec, mean, feedback)
            if shard_hook is not None:
                shard_hook(own)
            return self._all_gather(flat, codec, feedback)

        return self._enqueue(flat, both, feedback)

    def average_with(self, flat: Tensor, peers: Sequence[int]) -> Callable[[], Tensor]:
        """See :meth:`GlooExchange.average_with`; a collective call of all ranks, also of those without peers."""

        def average() -> Tensor:
            order, numel = sorted(peers), flat.numel()
            sizes = [numel if rank in order else 0 for rank in range(self._world_size)]
            received = flat.new_empty(len(order), numel)
            dist.all_to_all_single(received.view(-1), flat.repeat(len(order)), sizes, sizes, group=self._group)
            return mean_in_order({**dict(zip(order, received, strict=True)), self._rank: flat}, flat)

        return self._enqueue(flat, average)

    def average_at(self, flat: Tensor, server: int) -> Callable[[], Tensor]:
        """See :meth:`GlooExchange.average_at`; NCCL sums, in an order of its own."""

        def average() -> Tensor:
            total = flat.to(accumulation_dtype(flat.dtype), copy=True)
            dist.reduce(total, group=self._group, group_dst=server)
            if self._rank == server:
                flat.copy_(total.div_(self._world_size))
            dist.broadcast(flat, group=self._group, group_src=server)
            return flat

        return self._enqueue(flat, average)

    def broadcast(self, flat: Tensor, src: int) -> Callable[[], Tensor]:
        """Copies rank ``src``'s ``flat`` to all ranks; returns a function that waits for it."""

        def copy() -> Tensor:
            dist.broadcast(flat.view(torch.uint8), group=self._group, group_src=src)
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
        residuals = [] if feedback is None else [feedback.contribution, feedback.shard, feedback.idle]
        for tensor in (flat, *residuals):
            if tensor is not None:  # the allocator must not reuse its memory before this stream is done
                tensor.record_stream(self._stream)

        def wait() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(done)
            return result

        return wait

    def _reduce_scatter(self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None) -> Tensor:
        own = shard_of(flat, self._rank, self._world_size)
        if not self._sums(flat, codec):
            return self._exchange_and_sum(flat, own, codec, mean, feedback)
        rows = self._rows(flat)
        summed = rows.to(accumulation_dtype(flat.dtype))
        total, in_place = summed[self._rank], summed is rows and with_room(flat, rows.numel()) is not None
        reduce_scatter_single(total, summed.view(-1), self._group)
        if mean:
            total.div_(self._world_size)
        return own if in_place else own.copy_(total[: own.numel()])

    def _exchange_and_sum(
        self, flat: Tensor, own: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Tensor:
        shards = self._shards(codec, flat)
        sent, received = shards.wires(self._world_size), shards.wires(self._world_size)
        self._encode(shards, flat, sent, feedback)
        dist.all_to_all_single(received, sent, group=self._group)
        shards.sum(received, own, self._world_size if mean else 1)
        return own

    def _all_gather(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> Tensor:
        if codec.lossless:
            rows = self._rows(flat)
            all_gather_single(rows.view(-1), rows[self._rank], self._group)
            return copy_back(rows, flat)
        shards = self._shards(codec, flat)
        wires = shards.wires(self._world_size)
        wire = wires[self._rank : self._rank + 1]
        own = shard_of(flat, self._rank, self._world_size)
        residual = None if feedback is None else feedback.shard
        idle = None if feedback is None else feedback.idle
        idle = None if idle is None else shard_of(idle, self._rank, self._world_size)
        with kept(residual if residual is None else residual[: own.numel()], own, idle):
            shards.encode(own, wire, residual)
        all_gather_single(wires.view(-1), wire.view(-1), self._group)
        shards.decode(wires, flat)
        return flat

    def _sum_of_gathered(self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None) -> Tensor:
        shards = shards_of(codec, flat.numel(), flat)
        wires = shards.wires(self._world_size)
        wire = wires[self._rank : self._rank + 1]
        self._encode(shards, flat, wire, feedback)
        all_gather_single(wires.view(-1), wire.view(-1), self._group)
        shards.sum_in_order(wires, flat, self._world_size if mean else 1)
        return flat

    @staticmethod
    def _encode(shards: Shards, flat: Tensor, wires: Tensor, feedback: ErrorFeedback | None) -> None:
        residual, idle = (None, None) if feedback is None else (feedback.contribution, feedback.idle)
        with kept(residual, flat, idle):
            shards.encode(flat, wires, residual)

    def _gather_parts(self, flat: Tensor, part: slice) -> Tensor:
        size = shard_numel(flat.numel(), self._world_size)
        whole = flat.numel() // max(size, 1)  # the shard after these is shorter, and those that follow are empty
        rows, rest = flat[: whole * size].view(whole, size)[:, part], flat[whole * size :][part]
        own = shard_of(flat, self._rank, self._world_size)[part]
        own = torch.nn.functional.pad(own, (0, rows.shape[1] - own.numel()))
        gathered = torch.empty(self._world_size, rows.shape[1], dtype=flat.dtype, device=flat.device)
        all_gather_single(gathered.view(-1), own, self._group)
        rows.copy_(gathered[:whole])
        if rest.numel():
            rest.copy_(gathered[whole, : rest.numel()])
        return flat

    def _shards(self, codec: Codec, flat: Tensor) -> Shards:
        return shards_of(codec, shard_numel(flat.numel(), self._world_size), flat)

    def _rows(self, flat: Tensor) -> Tensor:
        return rows_of(flat, self._world_size, shard_numel(flat.numel(), self._world_size))

    def _sums(self, flat: Tensor, codec: Codec) -> bool:
        """Returns whether NCCL sums; it would sum 16-bit floats in 16 bits, and wire formats as bytes."""
        return codec.lossless and (self.sums_wide or accumulation_dtype(flat.dtype) == flat.dtype)
