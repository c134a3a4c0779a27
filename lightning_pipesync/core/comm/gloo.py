"""Reduce-scatter and all-gather over Gloo, as rings or all-to-all exchanges of messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import shard_numel
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.blocks import BLOCK_PER_THREAD
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.comm.handle import Promise
from lightning_pipesync.core.comm.hops import BufferPool, Exchange, all_to_all, ring, ring_is_faster
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback, encode_with_feedback

#: Operations are numbered by tags modulo this, in two series.
NUM_TAGS = 2**29

#: What an all-reduce does in place with a rank's slice of the sum, before it is gathered.
ShardHook = Callable[[Tensor], object]


#: The wire of no values.
NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Span(NamedTuple):
    """Slices of one size, of ``ranks`` that follow each other, which a codec encodes or decodes in one call.

    Attributes:
        place: where their values are in the buffer.
        wires: a row of bytes for each of them.
    """

    ranks: range
    place: slice
    wires: Tensor


def rows_of(span: Span, flat: Tensor) -> Tensor:
    """Returns the values of a buffer whose wires a span has, a row for each."""
    return flat[span.place].view(len(span.ranks), -1)


def wires_of(spans: Sequence[Span]) -> dict[int, Tensor]:
    """Returns the wires of spans, by rank."""
    return {rank: wire for span in spans for rank, wire in zip(span.ranks, span.wires.unbind(), strict=True)}


def encode_span(span: Span, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None) -> None:
    """Encodes ranks' slices, this rank's too, so that only encoded values are summed, on every rank."""
    residual = None if feedback is None else rows_of(span, feedback.contribution)
    idle = None if feedback is None or feedback.idle is None else rows_of(span, feedback.idle)
    encode_with_feedback(codec, rows_of(span, flat), span.wires, residual, idle)


def fit_a_block(numel: int) -> bool:
    """Returns whether a codec's operations on so many values find them in cache: then fewer calls are faster."""
    return numel <= BLOCK_PER_THREAD * torch.get_num_threads()


def mean_in_order(values: Mapping[int, Tensor], flat: Tensor) -> Tensor:
    """Sets ``flat`` to the mean of ``values``, by rank, which are overwritten: summed in the order of the ranks."""
    first, *others = sorted(values)
    total = values[first].to(accumulation_dtype(flat.dtype))
    for rank in others:
        total.add_(values[rank])
    return flat.copy_(total.div_(len(values)))


class GlooExchange:
    """Reduce-scatter and all-gather of flat CPU tensors over a Gloo process group.

    A call posts the first messages. The thread that waits does the rest, the sums included, after that of earlier
    calls, since all ranks must do so in the same order, see hops.py. A :class:`CommQueue` has a thread that waits while
    training continues.

    Args:
        group: a Gloo process group that nothing else uses.
        watch: has the timeout of a message, and names the rank at fault if it does not arrive.
    """

    #: Whether an all-reduce gathers wires, if the codec asks for that.
    gathers_wires = True

    def __init__(self, group: dist.ProcessGroup, watch: PeerWatch) -> None:
        self.group = group
        self._messages = Messages(group, 0, watch)
        self._rank, self._world_size = self._messages.rank, self._messages.world_size
        self._pool = BufferPool()
        self._tag = self._small_tag = 0
        self._unfinished: deque[tuple[Promise[Tensor], Callable[[], Tensor]]] = deque()
        self._finishing = threading.Lock()

    def exchange_small(self, own: Tensor, of_ranks: Sequence[Tensor]) -> Exchange:
        """Starts one small message to and from each peer, all at once.

        These have a series of tags of their own: a thread other than that of the collectives may send them at any time.
        """
        self._small_tag = (self._small_tag + 1) % NUM_TAGS
        messages = self._messages.tagged(NUM_TAGS + self._small_tag)
        peers = self._peers if own.numel() else []
        incoming = {peer: of_ranks[peer] for peer in peers}
        return all_to_all(messages, dict.fromkeys(peers, own), incoming, self._pool, window=self._world_size)

    def reduce_scatter(
        self, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        """Sums ``flat`` over the ranks into the slice that this rank owns; returns a function that waits for it."""
        tag, slices = self._next_tag(), self._slices(flat)
        return self._in_order(self._start_reduce_scatter(tag, flat, slices, codec, mean, feedback))

    def all_gather(
        self, flat: Tensor, codec: Codec, feedback: ErrorFeedback | None, part: slice | None = None
    ) -> Callable[[], Tensor]:
        """Sends the slice of ``flat`` that this rank owns to all; returns a function that waits for the others.

        Args:
            part: the part of each slice that is sent, without a codec; None: all.
        """
        slices = self._slices(flat) if part is None else [values[part] for values in self._slices(flat)]
        return self._in_order(self._start_all_gather(self._next_tag(), flat, slices, codec, feedback))

    def all_reduce(
        self,
        flat: Tensor,
        codec: Codec,
        mean: bool,
        feedback: ErrorFeedback | None,
        shard_hook: ShardHook | None = None,
    ) -> Callable[[], Tensor]:
        """Runs both halves, with ``shard_hook`` on this rank's slice in between; returns a function that waits.

        With a codec whose wires are gathered, there are no halves, and there must be no hook.
        """
        if codec.gathered and self.gathers_wires:
            assert shard_hook is None
            return self._in_order(self._start_sum_of_gathered(self._next_tag(), flat, codec, mean, feedback))
        slices = self._slices(flat)
        reduce = self._start_reduce_scatter(self._next_tag(), flat, slices, codec, mean, feedback)
        gather_tag = self._next_tag()

        def reduce_and_gather() -> Tensor:
            own = reduce()
            if shard_hook is not None:
                shard_hook(own)
            return self._start_all_gather(gather_tag, flat, slices, codec, feedback)()

        return self._in_order(reduce_and_gather)

    def average_with(self, flat: Tensor, peers: Sequence[int]) -> Callable[[], Tensor]:
        """Sets ``flat`` to its mean over this rank and ``peers``, which do so, too; returns a function that waits."""
        return self._in_order(self._start_mean(flat, peers, peers))

    def average_at(self, flat: Tensor, server: int) -> Callable[[], Tensor]:
        """Sets ``flat`` to its mean over all ranks, which rank ``server`` computes; returns a function that waits."""
        serves, peers = self._rank == server, self._peers
        push = self._start_mean(flat, *(((), peers) if serves else ([server], ())))
        pull = self._messages.tagged(self._next_tag())

        def average() -> Tensor:
            push()
            outgoing, incoming = (dict.fromkeys(peers, flat), {}) if serves else ({}, {server: flat})
            all_to_all(pull, outgoing, incoming, self._pool, window=self._world_size).finish()
            return flat

        return self._in_order(average)

    def release_memory(self) -> None:
        """Frees the buffers that are kept for reuse."""
        self._pool.clear()

    def _in_order(self, finish: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns a function that finishes the operations so far, in the order of the calls."""
        promise: Promise[Tensor] = Promise()
        self._unfinished.append((promise, finish))

        def wait() -> Tensor:
            with self._finishing:
                while not promise.done:
                    earlier, finish_earlier = self._unfinished.popleft()
                    earlier.run(finish_earlier)
            return promise.wait()

        return wait

    def _start_reduce_scatter(
        self,
        tag: int,
        flat: Tensor,
        slices: Sequence[Tensor],
        codec: Codec,
        mean: bool,
        feedback: ErrorFeedback | None,
    ) -> Callable[[], Tensor]:
        messages, own = self._messages.tagged(tag), slices[self._rank]
        summed_as_they_are = codec.lossless and accumulation_dtype(flat.dtype) == flat.dtype
        if summed_as_they_are and ring_is_faster(slices[0].nbytes, self._world_size):
            in_ring = ring(messages, slices, (self._rank - 1) % self._world_size, self._pool, adds=True)

            def reduce_in_ring() -> Tensor:
                in_ring.finish()
                return self._set(own, own, mean)

            return reduce_in_ring
        # Without a codec the values themselves are sent, without a copy.
        spans = [] if codec.lossless else self._spans(flat, codec)
        for span in spans:
            encode_span(span, flat, codec, feedback)
        wires = dict(enumerate(slices)) if codec.lossless else wires_of(spans)
        outgoing = {peer: wires[peer] for peer in self._peers if slices[peer].numel()}
        contributors = self._peers if summed_as_they_are else range(self._world_size)
        wire = wires.get(self._rank, own)
        arrivals = self._pool.take(len(contributors), wire.numel(), dtype=wire.dtype)
        received = dict(zip(contributors, arrivals.unbind(), strict=True))
        incoming = {peer: received[peer] for peer in self._peers if own.numel()}
        exchange = all_to_all(messages, outgoing, incoming, self._pool)

        def reduce() -> Tensor:
            if own.numel():
                if summed_as_they_are:
                    self._set(own, self._sum_values(exchange, {**received, self._rank: own}), mean)
                else:
                    received[self._rank].copy_(wire)
                    self._set(own, self._sum_wires(exchange, arrivals.view(torch.uint8), codec, own), mean)
            exchange.finish()
            self._pool.give(arrivals, *(span.wires for span in spans))
            return own

        return reduce

    def _sum_values(self, exchange: Exchange, contributions: Mapping[int, Tensor]) -> Tensor:
        """Adds in rank order, so that the result depends neither on the summing rank nor on the order of arrival."""
        order = sorted(contributions)
        if self._rank == 1:
            order[:2] = [1, 0]  # the same sum, in place
        exchange.wait_for(contributions)
        total = contributions[order[0]]
        for rank in order[1:]:
            total.add_(contributions[rank])
        return total

    def _sum_wires(self, exchange: Exchange, wires: Tensor, codec: Codec, own: Tensor) -> Tensor:
        """Decodes and adds in rank order, into ``own`` if that has the dtype of a sum; few values in one call."""
        dtype = accumulation_dtype(own.dtype)
        total = own if own.dtype == dtype else torch.empty_like(own, dtype=dtype)
        if fit_a_block(len(wires) * own.numel()):
            exchange.wait_for(range(self._world_size))
            decoded = self._pool.take(len(wires), own.numel(), dtype=dtype)
            codec.decode(wires, decoded, own.dtype)
            total.copy_(decoded[0])
            for values in decoded[1:].unbind():
                total.add_(values)
            self._pool.give(decoded)
            return total
        for rank, wire in enumerate(wires.unbind()):
            exchange.wait_for([rank])
            if rank == 0:
                codec.decode(wire, total, own.dtype)
            else:
                codec.decode_add(wire, total, own.dtype)
        return total

    def _set(self, values: Tensor, total: Tensor, mean: bool) -> Tensor:
        """Sets values, which may be ``total`` itself, to the sum or the mean; only that is rounded to their dtype."""
        if mean:
            total.div_(self._world_size)
        return values if total is values else values.copy_(total)

    def _start_all_gather(
        self, tag: int, flat: Tensor, slices: Sequence[Tensor], codec: Codec, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        if codec.lossless:
            exchange = self._gather_slices(tag, slices)

            def gather() -> Tensor:
                exchange.finish()
                return flat

            return gather

        own, spans = slices[self._rank], self._spans(flat, codec)
        wires = wires_of(spans)
        if own.numel():
            residual = None if feedback is None or feedback.shard is None else feedback.shard[: own.numel()]
            idle = None if feedback is None or feedback.idle is None else self._slices(feedback.idle)[self._rank]
            encode_with_feedback(codec, own, wires[self._rank], residual, idle)
        encoded = self._gather_slices(tag, [wires.get(rank, NO_BYTES) for rank in range(self._world_size)])

        def gather_and_decode() -> Tensor:
            for span in spans:  # the owner, too, uses the values that the others decode
                encoded.wait_for(span.ranks)
                codec.decode(span.wires, rows_of(span, flat), flat.dtype)
            encoded.finish()
            self._pool.give(*(span.wires for span in spans))
            return flat

        return gather_and_decode

    def _start_sum_of_gathered(
        self, tag: int, flat: Tensor, codec: Codec, mean: bool, feedback: ErrorFeedback | None
    ) -> Callable[[], Tensor]:
        """Sends all of ``flat``, encoded, to all ranks; each sums what all have sent, in the order of the ranks."""
        wires = self._pool.take(self._world_size, codec.wire_bytes(flat.numel(), flat.dtype))
        residual, idle = (None, None) if feedback is None else (feedback.contribution, feedback.idle)
        encode_with_feedback(codec, flat, wires[self._rank], residual, idle)
        exchange = self._gather_slices(tag, wires.unbind())

        def gather_and_sum() -> Tensor:
            if flat.numel():
                self._set(flat, self._sum_wires(exchange, wires, codec, flat), mean)
            exchange.finish()
            self._pool.give(wires)
            return flat

        return gather_and_sum

    def _gather_slices(self, tag: int, slices: Sequence[Tensor]) -> Exchange:
        messages, own = self._messages.tagged(tag), slices[self._rank]
        if ring_is_faster(slices[0].nbytes, self._world_size):
            return ring(messages, slices, self._rank, self._pool, adds=False)
        outgoing = dict.fromkeys(self._peers, own) if own.numel() else {}
        incoming = {peer: slices[peer] for peer in self._peers if slices[peer].numel()}
        return all_to_all(messages, outgoing, incoming, self._pool)

    def _start_mean(self, flat: Tensor, targets: Sequence[int], sources: Sequence[int]) -> Callable[[], Tensor]:
        """Sends ``flat`` to ranks, and then sets it to its mean over this rank and others, if there are some."""
        messages = self._messages.tagged(self._next_tag())
        received = {peer: self._pool.take(flat.numel(), dtype=flat.dtype) for peer in sources}
        exchange = all_to_all(messages, dict.fromkeys(targets, flat), received, self._pool, window=self._world_size)

        def average() -> Tensor:
            exchange.finish()  # ``flat`` is sent by then
            if received:
                mean_in_order({**received, self._rank: flat}, flat)
                self._pool.give(*received.values())
            return flat

        return average

    @property
    def _peers(self) -> list[int]:
        """The other ranks, in the order in which their slices arrive."""
        return [(self._rank - step) % self._world_size for step in range(1, self._world_size)]

    def _slices(self, flat: Tensor) -> list[Tensor]:
        slices = flat.split(shard_numel(flat.numel(), self._world_size))
        return [*slices, *[flat[flat.numel() :]] * (self._world_size - len(slices))]

    def _spans(self, flat: Tensor, codec: Codec) -> list[Span]:
        """Returns wires of the slices that are not empty, in the order in which a ring or all-to-all delivers them."""
        numel, size = flat.numel(), max(1, shard_numel(flat.numel(), self._world_size))
        whole = numel // size
        if fit_a_block(numel):
            ranks = [range(whole), range(whole, -(-numel // size))]
        else:
            ranks = [range(rank, rank + 1) for rank in (self._rank, *self._peers) if rank * size < numel]
        return [
            self._span(each, slice(each.start * size, min(each.stop * size, numel)), flat, codec)
            for each in ranks
            if each
        ]

    def _span(self, ranks: range, place: slice, flat: Tensor, codec: Codec) -> Span:
        num_bytes = codec.wire_bytes((place.stop - place.start) // len(ranks), flat.dtype)
        return Span(ranks, place, self._pool.take(len(ranks), num_bytes))

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % NUM_TAGS
        return self._tag
