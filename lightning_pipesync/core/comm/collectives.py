"""Collectives among the ranks of a process group.

[Note: one order]
Every rank must issue the same operations in the same order. So no operation may depend on the gradients of one rank
alone: the ranks first exchange their flags (:meth:`Collectives.exchange_flags`), then all take the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.gloo import GlooExchange, ShardHook
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.messages import end_waits
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.topology import Sent, Topology
from lightning_pipesync.core.comm.torus import NONE, TorusExchange
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.torch_private import foreach_copy_

T = TypeVar("T")


class Collectives:
    """Asynchronous collectives among the ranks of a process group.

    Over Gloo one advances only while a thread waits for it, or for a later one, such as that of a :class:`CommQueue`.

    Tensors are 1-D and contiguous; the collectives work in place. The number of values need not be a multiple of the
    number of ranks. CPU tensors use Gloo. CUDA tensors use NCCL, or, without it, Gloo through the host.

    Attributes:
        rank: this process, in ``range(world_size)``.
        world_size: number of processes.
        ranks: what the processes' ranks are in the default process group.
        traffic: bytes sent and seconds waited, per kind of operation.
        watch: names the rank at fault when a wait times out.
        waits: watches over this rank's waits here; another watch if the ranks are of several jobs.
        background: the thread of what is under way while nobody waits, if there is one.
        topology: how the ranks are arranged, which says whose residuals are of which values.

    Args:
        rank: this process' rank in the default process group.
        gloo: exchanges flags, and tensors on the host.
        nccl: exchanges tensors on CUDA devices; None: Gloo does.
        kind: what the kinds of operations begin with in ``traffic``.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        gloo: GlooExchange,
        nccl: NcclExchange | None,
        traffic: Traffic,
        watch: PeerWatch,
        kind: str = "",
    ) -> None:
        self.rank, self.world_size, self.ranks = ranks.index(rank), len(ranks), ranks
        self.traffic, self.watch, self.waits = traffic, watch, watch
        self._gloo, self._nccl = gloo, nccl
        self._exchange: GlooExchange | NcclExchange | TorusExchange = nccl or gloo
        self.topology: Topology = Topology(len(ranks))
        self._kind, self._closed = kind, False
        self.background: CommQueue | None = None

    def reduce_scatter(
        self, flat: Tensor, *, codec: str | Codec = "none", mean: bool = False, feedback: ErrorFeedback | None = None
    ) -> Handle[Tensor]:
        """Sums ``flat`` over the ranks; each rank gets a slice of the sum.

        Args:
            flat: not to be used until the handle has been waited for. Then this rank's :meth:`shard` of it holds the
                sum, and the rest is undefined.
            codec: the wire format. The owner of a slice decodes and sums in fp32 (fp64 for fp64).
            mean: whether to divide the sum by the number of ranks.
            feedback: the residuals of this buffer, for error feedback.

        Returns:
            A handle of this rank's slice: :meth:`shard`.
        """
        codec = self._check(flat, codec, mean)
        self._issue("reduce_scatter", self._contribution_bytes(flat, codec))
        start = self._exchange_of(flat).reduce_scatter
        return self._launch("reduce_scatter", flat, lambda t: start(t, codec, mean, feedback))

    def all_gather(
        self,
        flat: Tensor,
        *,
        codec: str | Codec = "none",
        feedback: ErrorFeedback | None = None,
        part: slice | None = None,
    ) -> Handle[Tensor]:
        """Fills ``flat`` with every rank's :meth:`shard` of it; arguments as in :meth:`reduce_scatter`.

        With a lossy codec this rank's own slice is decoded, too, so that all ranks hold the same values.

        Args:
            part: fills only this slice of every rank's shard; where :attr:`gathers_parts`, and without compression.
        """
        codec = self._check(flat, codec)
        if part is not None and not (self.gathers_parts and codec.lossless):
            raise ValueError(f"A part of a shard cannot be gathered with {codec}, or on a 2-D torus.")
        self._issue("all_gather", self._gather_bytes(flat, codec, part))
        start = self._exchange_of(flat).all_gather
        return self._launch("all_gather", flat, lambda t: start(t, codec, feedback, part), part)

    def all_reduce(
        self,
        flat: Tensor,
        *,
        codec: str | Codec = "none",
        mean: bool = False,
        feedback: ErrorFeedback | None = None,
        shard_hook: ShardHook | None = None,
        background: bool = False,
    ) -> Handle[Tensor]:
        """Sums ``flat`` over the ranks in place: a reduce-scatter, then an all-gather.

        A codec with :attr:`Codec.gathered` encodes once instead: all ranks get what each has encoded, and sum it in the
        same order. On a torus the ranks of a column do. On a tree the sum is encoded, once, with any codec.

        Args:
            shard_hook: changes this rank's slice of the sum, in place, before it is gathered; called on any thread. Not
                with such a codec: there are no slices.
            background: whether a thread completes it while nobody waits.
        """
        codec = self._check(flat, codec, mean)
        if codec.gathered and shard_hook is not None:
            raise ValueError(f"With {codec} no rank has a slice of the sum alone, which shard_hook could change.")
        self._issue(
            "all_reduce",
            self._contribution_bytes(flat, codec, codec.gathered)
            + self._gather_bytes(flat, codec, wires=codec.gathered),
        )
        if self._alone and shard_hook is not None:
            shard_hook(flat)
        start = self._exchange_of(flat).all_reduce
        handle = self._launch("all_reduce", flat, lambda t: start(t, codec, mean, feedback, shard_hook))
        return self._in_background("all_reduce", handle, flat.device) if background else handle

    def average_with(self, flat: Tensor, peers: Sequence[int], *, background: bool = False) -> Handle[Tensor]:
        """Sets ``flat`` to its mean over this rank and ``peers``, summed in the order of the ranks.

        All ranks call it, also those without peers. A rank's peers have it as theirs.

        Args:
            flat: floating-point; not to be used until the handle has been waited for.
            peers: ranks in ``range(world_size)``, without this one. Each gets all of ``flat``.
            background: as in :meth:`all_reduce`.
        """
        exchange, num_bytes = self._flat_exchange_of(flat), flat.nbytes * len(peers)
        return self._average("average_with", flat, num_bytes, lambda t: exchange.average_with(t, peers), background)

    def average_at(self, flat: Tensor, server: int = 0, *, background: bool = False) -> Handle[Tensor]:
        """Sets ``flat`` to its mean over all ranks, summed in their order by rank ``server``: a push and a pull.

        All bytes of all ranks pass the server's link; an all-reduce takes 1 / world_size of the time.

        Args:
            flat: floating-point; not to be used until the handle has been waited for.
            server: a rank in ``range(world_size)``.
            background: as in :meth:`all_reduce`.
        """
        exchange = self._flat_exchange_of(flat)
        num_bytes = flat.nbytes * (self.world_size - 1 if self.rank == server else 1)
        return self._average("average_at", flat, num_bytes, lambda t: exchange.average_at(t, server), background)

    def broadcast(self, flat: Tensor, src: int = 0) -> Handle[Tensor]:
        """Copies rank ``src``'s ``flat``, of any dtype, to all ranks, in place; counted at ``src``."""
        self._issue("broadcast", flat.numel() * flat.element_size() if self.rank == src and not self._alone else 0)
        if self._nccl is not None and flat.is_cuda:
            return self._handle("broadcast", self._nccl.broadcast(flat, src))
        host = flat.cpu()
        work = self.group.broadcast(host.view(torch.uint8), src)

        def wait() -> Tensor:
            sender = self.ranks[src]
            with self.waits.waiting(f"the broadcast of rank {sender}", None if self.rank == src else sender):
                work.wait(self.waits.timeout)
            return flat if host is flat else flat.copy_(host)

        return self._handle("broadcast", wait)

    def exchange_flags(self, flag: int) -> Handle[list[int]]:
        """All-gathers ``flag``, one byte (0 to 255); the handle's result is every rank's flag, by rank."""
        return self._exchange_bytes("flags", [flag], lambda flags: flags[:, 0].tolist())

    def exchange_digests(self, digest: bytes) -> list[bytes]:
        """Returns every rank's ``digest``, of the same number of bytes on all, by rank, after all have it; blocks."""
        return self._exchange_bytes("digests", list(digest), lambda rows: [bytes(row.tolist()) for row in rows]).wait()

    def union(self, flags: Sequence[bool]) -> Handle[list[bool]]:
        """Reduces ``flags``, the same number on every rank, by "or" over the ranks.

        This and :meth:`exchange_flags` do not wait for other operations in flight, and may be called on another thread
        than the collectives. Their order must be the same on all ranks: two threads may take turns only if one waits
        for the other in between.
        """
        return self._exchange_bytes("union", flags, lambda of_ranks: of_ranks.bool().any(dim=0).tolist())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent by these collectives."""
        return sum(number for kind, number in self.traffic.bytes_sent.items() if kind.startswith(self._kind))

    @property
    def gathers_parts(self) -> bool:
        """Whether :meth:`all_gather` can fill a part of each shard."""
        return self.topology.gathers_parts

    def parts(self, flat: Tensor, part: slice) -> list[Tensor]:
        """Returns a slice of every rank's :meth:`shard`, by rank: views."""
        return [flat[self.shard_slice(flat.numel(), rank)][part] for rank in range(self.world_size)]

    def shard(self, flat: Tensor) -> Tensor:
        """Returns the slice of ``flat`` that this rank owns: a view."""
        return flat[self.shard_slice(flat.numel(), self.rank)]

    def shard_slice(self, numel: int, rank: int) -> slice:
        """Returns the slice of a buffer of ``numel`` values that ``rank`` owns."""
        return self.topology.shard_slice(numel, rank)

    def feedback(self, flat: Tensor, gathered: bool = True) -> ErrorFeedback:
        """Returns new residuals for ``flat``, on the device where it is encoded.

        Args:
            gathered: whether it is all-gathered, too, and not only reduce-scattered.
        """
        return ErrorFeedback(flat.cpu() if self._staged(flat) else flat, self.topology.num_shards, gathered)

    def encodes_sums(self, codec: Codec) -> bool:
        """Whether :meth:`all_reduce` encodes sums, too, which have residuals of their own."""
        return not codec.gathered or self.topology.sends_sums

    def release_memory(self) -> None:
        """Frees the buffers that are kept for reuse."""
        self._exchange.release_memory()

    @property
    def group(self) -> dist.ProcessGroup:
        """Gloo's group."""
        return self._gloo.group

    def end_waits(self) -> None:
        """Ends all waits over Gloo with an error, for good."""
        end_waits(self.group)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the thread; waits at most ``timeout_s`` seconds for operations in flight."""
        self._closed = True
        if self.background is not None:
            self.background.close(timeout_s)

    def _exchange_bytes(self, kind: str, own: Sequence[int], read: Callable[[Tensor], T]) -> Handle[T]:
        """All-gathers bytes; ``read`` makes the result from those of all ranks, shape ``[world_size, len(own)]``."""
        self._issue(kind, len(own) * (self.world_size - 1))
        of_ranks = torch.zeros(self.world_size, len(own), dtype=torch.uint8)
        of_ranks[self.rank] = torch.tensor(own, dtype=torch.uint8)
        exchange = self._gloo.exchange_small(of_ranks[self.rank], of_ranks.unbind())

        def wait() -> T:
            exchange.finish()
            return read(of_ranks)

        return self._handle(kind, wait)

    def _check(self, flat: Tensor, codec: str | Codec, mean: bool = False) -> Codec:
        codec = get_codec(codec)
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"A collective takes a 1-D contiguous tensor, got shape {tuple(flat.shape)}.")
        if not flat.is_floating_point() and (mean or not codec.lossless):
            raise ValueError(f"A tensor of {flat.dtype} cannot be averaged or compressed; sum it with codec='none'.")
        return codec

    def _issue(self, kind: str, num_bytes: int) -> None:
        if self._closed:
            raise RuntimeError("The transport is closed.")
        self.traffic.count(self._kind + kind, num_bytes)

    def _contribution_bytes(self, flat: Tensor, codec: Codec, wires: bool = False) -> int:
        """Returns the bytes that this rank sends in a reduce-scatter; ``wires``: see :class:`Topology`."""
        wide = self.topology.sends_sums or (flat.is_cuda and self._nccl is not None and self._nccl.sums_wide)
        dtype = accumulation_dtype(flat.dtype) if wide else flat.dtype
        return _bytes(self.topology.sent_to_reduce, flat.numel(), self.rank, wires, codec, flat.dtype, dtype)

    def _gather_bytes(self, flat: Tensor, codec: Codec, part: slice | None = None, wires: bool = False) -> int:
        if part is not None:
            sent = self.topology.sent_to_gather(flat.numel(), self.rank)
            return sum(len(range(*part.indices(numel))) for numel, _ in sent) * flat.element_size()
        return _bytes(self.topology.sent_to_gather, flat.numel(), self.rank, wires, codec, flat.dtype, flat.dtype)

    def _flat_exchange_of(self, flat: Tensor) -> GlooExchange | NcclExchange:
        """Returns the exchange of a tensor's device whose messages no topology changes."""
        return self._gloo if self._nccl is None or not flat.is_cuda else self._nccl

    def _average(
        self, kind: str, flat: Tensor, num_bytes: int, start: Callable[[Tensor], Callable[[], Tensor]], background: bool
    ) -> Handle[Tensor]:
        """Starts an average in which this rank sends so many bytes, not encoded."""
        self._check(flat, "none", mean=True)
        self._issue(kind, num_bytes)
        handle = self._launch(kind, flat, start)
        return self._in_background(kind, handle, flat.device) if background else handle

    def _in_background(self, kind: str, handle: Handle[Tensor], device: torch.device) -> Handle[Tensor]:
        """Has a thread complete an operation while nobody waits, unless it completes by itself."""
        if not handle.finishes_early:
            return handle
        if self.background is None:
            self.background = CommQueue("pipesync-background", device, self.traffic)
        return self.background.submit(kind, lambda: handle)

    @property
    def _alone(self) -> bool:
        """Whether there is no other rank, so that nothing is exchanged."""
        return self.world_size == 1

    def _exchange_of(self, flat: Tensor) -> GlooExchange | NcclExchange | TorusExchange:
        # NCCL carries no tensor of the host, such as a buffer that a user keeps there.
        return self._exchange if flat.is_cuda or self._nccl is None else self._gloo

    def _staged(self, flat: Tensor) -> bool:
        return flat.is_cuda and self._nccl is None

    def _launch(
        self, kind: str, flat: Tensor, start: Callable[[Tensor], Callable[[], Tensor]], part: slice | None = None
    ) -> Handle[Tensor]:
        if self._alone:
            return self._handle(kind, lambda: flat)
        if not self._staged(flat):
            return self._handle(kind, start(flat), finishes_early=self._exchange_of(flat) is self._gloo)
        host = flat.cpu()
        wait = start(host)

        def wait_and_copy() -> Tensor:
            result = wait()
            if part is None:
                flat.copy_(host)
            else:  # other parts may have arrived since ``host`` was copied
                foreach_copy_(self.parts(flat, part), self.parts(host, part))
            return flat if result is host else self.shard(flat)

        return self._handle(kind, wait_and_copy)

    def _handle(self, kind: str, wait: Callable[[], T], finishes_early: bool = True) -> Handle[T]:
        def counted() -> T:
            with self.traffic.waiting(self._kind + kind):
                return wait()

        return Handle(counted, finishes_early)


@lru_cache(maxsize=1024)
def _bytes(
    sent: Callable[[int, int, bool], list[Sent]],
    numel: int,
    rank: int,
    wires: bool,
    codec: Codec,
    dtype: torch.dtype,
    unencoded: torch.dtype,
) -> int:
    """Returns the bytes of what a rank sends of values of ``dtype``: of ``unencoded`` without a lossy codec.

    ``sent`` is a method of :class:`Topology`. A buffer is exchanged in each step.
    """
    codecs = ((size, codec if encoded else NONE) for size, encoded in sent(numel, rank, wires))
    return sum(each.wire_bytes(size, unencoded if each.lossless else dtype) for size, each in codecs)
