"""Reduce-scatter and all-gather over Gloo, from messages between pairs of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.feedback import ErrorFeedback, encode_with_feedback
from lightning_pipesync.core.handle import Promise, Worker
from lightning_pipesync.core.pairwise import PairwiseExchange
from lightning_pipesync.core.shards import accumulation_dtype, shard_of


class BufferPool:
    """Byte buffers that are used again, so that nothing is allocated after the first step."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Returns a uint8 tensor of ``num_bytes`` elements with undefined content."""
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give(self, buffers: list[Tensor]) -> None:
        """Takes back what :meth:`take` returned."""
        with self._lock:
            for buffer in buffers:
                self._free.setdefault(buffer.numel(), []).append(buffer)


class GlooExchange:
    """Reduce-scatter and all-gather of flat CPU tensors over a Gloo process group.

    The caller's thread posts the messages of a reduce-scatter. One worker thread sums what arrives and posts the
    all-gather; another completes the all-gathers. So a whole all-reduce proceeds beside training.

    Args:
        group: a Gloo process group that nothing else uses.
        timeout: how long to wait for one message.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._pool = BufferPool()
        self._tag = 0
        self._reducing = Worker("pipesync-reduce")
        self._gathering = Worker("pipesync-gather")

    def pairwise(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> PairwiseExchange:
        """Starts one small message to and from each peer, all at once."""
        return PairwiseExchange(
            self._group, self._next_tag(), self._timeout, outgoing, incoming, window=self._world_size
        )

    def reduce_scatter(
        self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        """Sums ``flat`` over the ranks into the slice that this rank owns; returns what waits for that slice."""
        promise: Promise[Tensor] = Promise()
        reduce = self._start_reduce_scatter(self._next_tag(), flat, codec, mean, feedback)
        self._reducing.submit(lambda: promise.run(reduce))
        return promise.wait

    def all_gather(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> Callable[[], Tensor]:
        """Sends the slice of ``flat`` that this rank owns to all; returns what waits for the slices of the others."""
        promise: Promise[Tensor] = Promise()
        gather = self._start_all_gather(self._next_tag(), flat, codec, feedback)
        self._gathering.submit(lambda: promise.run(gather))
        return promise.wait

    def all_reduce(
        self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        """Does both halves, one after the other; returns what waits for ``flat``."""
        promise: Promise[Tensor] = Promise()
        reduce = self._start_reduce_scatter(self._next_tag(), flat, codec, mean, feedback)
        tag = self._next_tag()  # drawn here, in the order of the calls: the worker's order is not the same on all ranks

        def reduce_then_gather() -> None:
            try:
                reduce()
                gather = self._start_all_gather(tag, flat, codec, feedback)
                self._gathering.submit(lambda: promise.run(gather))
            except BaseException as error:
                promise.fail(error)

        self._reducing.submit(reduce_then_gather)
        return promise.wait

    def close(self, timeout_s: float) -> None:
        """Ends the threads, after the operations in flight or after ``timeout_s`` seconds each."""
        self._reducing.close(timeout_s)
        self._gathering.close(timeout_s)

    def _start_reduce_scatter(
        self, tag: int, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        own, num_bytes = self._shard(flat), codec.wire_bytes(self._shard(flat).numel(), flat.dtype)
        received = {peer: self._pool.take(num_bytes) for peer in self._peers if num_bytes}
        if codec.lossless:  # the values themselves travel, without a copy
            incoming = {peer: buffer.view(flat.dtype) for peer, buffer in received.items()}
            outgoing = {peer: self._shard(flat, peer) for peer in self._peers}
            encoded: dict[int, Tensor] = {}
        else:
            incoming, outgoing = received, self._encode_slices(flat, codec, feedback)
            encoded = outgoing.copy()
        own_wire = outgoing.pop(self._rank, own)
        exchange = self._pairwise(tag, outgoing, incoming)

        def reduce() -> Tensor:
            contributions = {**incoming, self._rank: own_wire}
            divisor = self._world_size if mean else 1
            if own.numel():
                if codec.lossless and accumulation_dtype(own.dtype) == own.dtype:
                    self._sum_values(exchange, contributions, own, divisor)
                else:
                    self._sum_wires(exchange, contributions, codec, own, divisor)
            exchange.finish()
            self._pool.give([*received.values(), *encoded.values()])
            return own

        return reduce

    def _encode_slices(self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> dict[int, Tensor]:
        """Encodes every rank's slice, this rank's too: what is summed is what was encoded, whoever sums it."""
        wires = {}
        for rank in range(self._world_size):
            source = self._shard(flat, rank)
            wires[rank] = self._pool.take(codec.wire_bytes(source.numel(), flat.dtype))
            residual = None if feedback is None else self._shard(feedback.contribution, rank)
            encode_with_feedback(codec, source, wires[rank], residual)
        return wires

    def _sum_values(
        self, exchange: PairwiseExchange, contributions: dict[int, Tensor], own: Tensor, divisor: int
    ) -> None:
        """Adds in the order of the ranks, so that the result does not depend on who sums or what arrives first."""
        order = sorted(contributions)
        if self._rank == 1:
            order[:2] = [1, 0]  # the same sum, in place
        exchange.wait_for(order[0])
        total = contributions[order[0]]
        for rank in order[1:]:
            exchange.wait_for(rank)
            total.add_(contributions[rank])
        if divisor != 1:
            total.div_(divisor)
        if total is not own:
            own.copy_(total)

    def _sum_wires(
        self, exchange: PairwiseExchange, contributions: dict[int, Tensor], codec: Codec, own: Tensor, divisor: int
    ) -> None:
        """Decodes and adds in the order of the ranks; only the quotient is rounded to the type of ``own``."""
        dtype = accumulation_dtype(own.dtype)
        total = own if own.dtype == dtype else torch.empty_like(own, dtype=dtype)
        for rank in sorted(contributions):
            exchange.wait_for(rank)
            wire = contributions[rank].view(torch.uint8)
            if rank == 0:
                codec.decode(wire, total, own.dtype)
            else:
                codec.decode_add(wire, total, own.dtype)
        if divisor != 1:
            total.div_(divisor)
        if total is not own:
            own.copy_(total)

    def _start_all_gather(
        self, tag: int, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        own = self._shard(flat)
        slices = {peer: piece for peer in self._peers if (piece := self._shard(flat, peer)).numel()}
        if codec.lossless:
            exchange = self._pairwise(tag, dict.fromkeys(self._peers, own), slices)

            def gather() -> Tensor:
                exchange.finish()
                return flat

            return gather

        wire = self._pool.take(codec.wire_bytes(own.numel(), flat.dtype))
        encode_with_feedback(codec, own, wire, None if feedback is None else feedback.shard[: own.numel()])
        codec.decode(wire, own, flat.dtype)  # the owner, too, goes on with what the others will decode
        wires = {p: self._pool.take(codec.wire_bytes(piece.numel(), flat.dtype)) for p, piece in slices.items()}
        exchange = self._pairwise(tag, dict.fromkeys(self._peers, wire), wires)

        def gather_and_decode() -> Tensor:
            for peer, piece in slices.items():
                exchange.wait_for(peer)
                codec.decode(wires[peer], piece, flat.dtype)
            exchange.finish()
            self._pool.give([wire, *wires.values()])
            return flat

        return gather_and_decode

    def _pairwise(self, tag: int, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> PairwiseExchange:
        filled = {peer: message for peer, message in outgoing.items() if message.numel()}
        return PairwiseExchange(self._group, tag, self._timeout, filled, incoming)

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def _shard(self, flat: Tensor, rank: int | None = None) -> Tensor:
        return shard_of(flat, self._rank if rank is None else rank, self._world_size)

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % 2**30
        return self._tag
