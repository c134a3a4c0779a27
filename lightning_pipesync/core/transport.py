"""All traffic of a method goes through here, over process groups that nothing else uses.

[Note: one order]
Every rank must issue the same operations in the same order. What a rank does may therefore never depend on its own
gradients alone: a decision is exchanged first (:meth:`Transport.exchange_flags`), then taken by all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, serialization

from lightning_pipesync.core.buckets import shard_of, shard_slice
from lightning_pipesync.core.channel import MessageReceiver, MessageSender
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.gloo import NUM_TAGS, GlooExchange
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.messages import Messages
from lightning_pipesync.core.nccl import NcclExchange
from lightning_pipesync.core.shutdown import destroy_process_groups_at_shutdown
from lightning_pipesync.core.torus import Torus, TorusExchange
from lightning_pipesync.core.traffic import Traffic

T = TypeVar("T")


class Transport:
    """Asynchronous collectives and messages among the ranks of the default process group.

    Tensors are 1-D and contiguous; the collectives work in place. Numbers of values need not divide by the number of
    ranks. CPU tensors travel over Gloo. CUDA tensors travel over NCCL, or, where ``backend="gloo"``, through the host.

    Attributes:
        rank: this process, in ``range(world_size)``.
        world_size: number of processes.
        device: where the tensors of the collectives are.
        traffic: bytes sent and seconds waited, per kind of operation.
        watch: says which rank is at fault when one waits in vain.

    Args:
        device: where the tensors of the collectives are.
        timeout_s: seconds after which a peer that does not answer counts as lost.
        backend: ``"gloo"`` or ``"nccl"``; ``None`` picks NCCL for CUDA devices where it is there, else Gloo.
        topology: ``"flat"``: every rank with every other. ``"torus2d"``: along rows, then along columns; without
            compression.
        torus_columns: neighboring ranks in a row of the torus; None: as square as possible.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, or a rank did not connect in time.
        ValueError: ``timeout_s`` is not positive, the backend does not fit the device, or the ranks cannot form the
            torus, or do not agree on it.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        timeout_s: float = 1800.0,
        backend: str | None = None,
        topology: str = "flat",
        torus_columns: int | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialized: call init_process_group() first.")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s!r}.")
        self.device = torch.device(device)
        backend = backend or ("nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo")
        if backend not in ("gloo", "nccl") or (backend == "nccl" and self.device.type != "cuda"):
            raise ValueError(
                f"backend={backend!r} cannot carry tensors on {self.device}: use 'gloo', or 'nccl' on CUDA."
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.traffic = Traffic()
        self._groups: list[dist.ProcessGroup] = []
        self._timeout = timedelta(seconds=timeout_s)
        destroy_process_groups_at_shutdown()
        # Flags, objects and single messages go through the host: reading them must not wait for the device.
        self._control = self._new_group("gloo")
        self.watch = PeerWatch(self._timeout, lambda: self.traffic.num_operations)
        self._gloo = GlooExchange(self._control, self.watch)
        self._nccl = NcclExchange(self._new_group("nccl"), self.device) if backend == "nccl" else None
        self._exchange: GlooExchange | NcclExchange | TorusExchange = self._nccl or self._gloo
        try:
            self._torus = self._agreed_torus(topology, torus_columns)
        except ValueError:
            self.close()
            raise
        if self._torus is not None:
            row, column = self._exchange_within(self._torus.row_of), self._exchange_within(self._torus.column_of)
            self._exchange = TorusExchange(self._torus, self.rank, row, column)
        for group in self._groups:
            if dist.get_backend(group) == "gloo":
                dist.barrier(group)  # its connections have carried something, before the store is used beside them
        self.watch.start(self._control)
        # A rank that is done early, and closes, must not break the connections that a slower one is still making.
        with self.watch.waiting("all ranks to connect"):
            dist.barrier(self._control)

    def reduce_scatter(
        self, flat: Tensor, *, codec: str | Codec = "none", mean: bool = False, feedback: ErrorFeedback | None = None
    ) -> Handle[Tensor]:
        """Sums ``flat`` over the ranks, each rank a slice of it.

        Args:
            flat: 1-D contiguous tensor, not to be touched until the handle has been waited for. Then this rank's
                :meth:`shard` of it holds the sum and the rest is undefined.
            codec: what travels. It is decoded and summed in fp32 (fp64 for fp64) by the owner of the slice.
            mean: divide the sum by the number of ranks.
            feedback: the residuals of this buffer, to make good what the codec drops.

        Returns:
            A handle on this rank's slice, shape ``[ceil(numel / world_size)]``, less for the last ranks.
        """
        codec = self._check(flat, codec, mean)
        self._issue("reduce_scatter", self._contribution_bytes(flat, codec))
        return self._launch("reduce_scatter", flat, lambda t: self._exchange.reduce_scatter(t, codec, mean, feedback))

    def all_gather(
        self, flat: Tensor, *, codec: str | Codec = "none", feedback: ErrorFeedback | None = None
    ) -> Handle[Tensor]:
        """Fills ``flat`` with every rank's :meth:`shard` of it; arguments as in :meth:`reduce_scatter`.

        With a lossy codec this rank's own slice, too, becomes what the others decode: all ranks hold the same values.
        """
        codec = self._check(flat, codec)
        self._issue("all_gather", self._gather_bytes(flat, codec))
        return self._launch("all_gather", flat, lambda t: self._exchange.all_gather(t, codec, feedback))

    def all_reduce(
        self, flat: Tensor, *, codec: str | Codec = "none", mean: bool = False, feedback: ErrorFeedback | None = None
    ) -> Handle[Tensor]:
        """Sums ``flat`` over the ranks in place: a reduce-scatter, then an all-gather, both beside training."""
        codec = self._check(flat, codec, mean)
        self._issue("all_reduce", self._contribution_bytes(flat, codec) + self._gather_bytes(flat, codec))
        return self._launch("all_reduce", flat, lambda t: self._exchange.all_reduce(t, codec, mean, feedback))

    def exchange_flags(self, flag: int) -> Handle[list[int]]:
        """Tells all ranks this rank's ``flag``, one byte (0 to 255); the handle's result is every rank's, by rank."""
        return self._exchange_bytes("flags", [flag], lambda flags: flags[:, 0].tolist())

    def union(self, flags: Sequence[bool]) -> Handle[list[bool]]:
        """Tells for each of some ``flags``, as many on every rank, whether it is true on any rank.

        This and :meth:`exchange_flags` wait for nothing else that is on its way, and may be called on another thread
        than the collectives. Messages are numbered in the order of these calls, which has to be the same on all ranks,
        so that two threads may take turns only where one waits for the other in between: DeAR's main thread calls when
        its queue, which has called before, has no operation in flight.
        """
        return self._exchange_bytes("union", flags, lambda of_ranks: of_ranks.bool().any(dim=0).tolist())

    def send(self, tensor: Tensor, dst: int) -> Handle[None]:
        """Sends a contiguous CPU tensor to rank ``dst``, which calls :meth:`recv`; messages keep their order."""
        self._issue("send", tensor.numel() * tensor.element_size())
        work = dist.isend(tensor, dst, self._control)
        return self._handle("send", lambda: self._finish(work, f"rank {dst} to receive a message", dst))

    def recv(self, tensor: Tensor, src: int) -> Handle[None]:
        """Receives into a contiguous CPU tensor what rank ``src`` sent with :meth:`send`."""
        self._issue("recv", 0)
        work = dist.irecv(tensor, src, self._control)
        return self._handle("recv", lambda: self._finish(work, f"a message from rank {src}", src))

    def channel_to(
        self, dst: int, series: int, *, wire_dtype: torch.dtype | None = None, window: int = 1
    ) -> MessageSender:
        """Returns the near end of a channel to rank ``dst``, which calls :meth:`channel_from` with the same ``series``.

        Args:
            dst: the receiver.
            series: number of the channel; two that are open between the same ranks differ in it.
            wire_dtype: what wider floating-point tensors travel as; None: as they are.
            window: messages on their way before the next one waits.
        """
        return MessageSender(self._series(series), dst, self.traffic, wire_dtype, window)

    def channel_from(self, src: int, series: int) -> MessageReceiver:
        """Returns the far end of a channel from rank ``src``."""
        messages = self._series(series, ahead=True)
        return MessageReceiver(messages, src, self.device, f"pipesync-channel-{series}", self.traffic)

    def broadcast(self, flat: Tensor, src: int = 0) -> Handle[Tensor]:
        """Copies rank ``src``'s ``flat`` (1-D, contiguous, of any dtype) to all ranks, in place; counted at ``src``."""
        self._issue("broadcast", flat.numel() * flat.element_size() if self.rank == src and self.world_size > 1 else 0)
        if self._nccl is not None and flat.is_cuda:
            return self._handle("broadcast", self._nccl.broadcast(flat, src))
        host = flat.cpu()
        work = dist.broadcast(host.view(torch.uint8), src, self._control, async_op=True)

        def wait() -> Tensor:
            self._finish(work, f"the broadcast of rank {src}", None if self.rank == src else src)
            return flat if host is flat else flat.copy_(host)

        return self._handle("broadcast", wait)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Returns every rank's ``obj`` (picklable and small), by rank, on all ranks; blocks. Its bytes do not count."""
        objects: list[Any] = [None] * self.world_size
        with self.traffic.waiting("objects"), self.watch.waiting("what all ranks have to tell"):
            dist.all_gather_object(objects, obj, group=self._control)
        return objects

    def collect_states(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Returns every rank's ``state`` on rank 0, by rank, and None elsewhere; blocks.

        The states travel one after the other. Tensors come back on the CPU.
        """
        buffer = io.BytesIO()
        serialization.save(state, buffer)  # who replaces torch.save, to count or redirect, means what is written
        wire = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        sizes = self.gather_objects(wire.numel())
        if self.rank != 0:
            self.send(wire, 0).wait()
            return None
        states = []
        for rank, size in enumerate(sizes):
            received = wire if rank == 0 else torch.empty(size, dtype=torch.uint8)
            if rank != 0:
                self.recv(received, rank).wait()
            # These are this job's own processes, whose states may hold what the safe mode refuses.
            read = io.BytesIO(received.numpy().tobytes())
            states.append(serialization.load(read, map_location="cpu", weights_only=False))
        return states

    def new_group(self) -> dist.ProcessGroup:
        """Returns a process group of all ranks for a library that communicates itself; a collective call."""
        return self._new_group("gloo" if self._nccl is None else "nccl")

    def shard(self, flat: Tensor) -> Tensor:
        """Returns the slice of ``flat`` that this rank owns: a view."""
        return flat[self.shard_slice(flat.numel(), self.rank)]

    def shard_slice(self, numel: int, rank: int) -> slice:
        """Returns which of a buffer's ``numel`` values ``rank`` owns."""
        if self._torus is not None:
            return self._torus.shard_slice(numel, rank)
        return shard_slice(numel, rank, self.world_size)

    def feedback(self, flat: Tensor) -> ErrorFeedback:
        """Returns new residuals for ``flat``, where its wire format is made."""
        return ErrorFeedback(flat.cpu() if self._staged(flat) else flat, self.world_size)

    def release_memory(self) -> None:
        """Gives back the memory that was kept for messages of sizes that may not come again."""
        self._exchange.release_memory()

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and the process groups; waits at most ``timeout_s`` seconds for what is in flight.

        While an exception is handled, the other ranks are told of it.
        """
        self.watch.close()
        self._exchange.close(timeout_s)
        if self._exchange is not self._gloo:
            self._gloo.close(timeout_s)
        for group in self._groups:
            with suppress(Exception):  # a group whose peers have died cannot be left in order
                dist.destroy_process_group(group)
        self._groups.clear()

    def _series(self, number: int, *, ahead: bool = False) -> Messages:
        """Returns messages that are numbered apart from the collectives, which go through the same group."""
        return Messages(self._control, 2 * NUM_TAGS + number, self.watch, ahead=ahead)

    def _new_group(self, backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Returns a group of some ranks, all if None; a collective call of all."""
        group = dist.new_group(ranks, backend=backend, timeout=self._timeout)
        if ranks is None or self.rank in ranks:
            self._groups.append(group)
        return group

    def _agreed_torus(self, topology: str, columns: int | None) -> Torus | None:
        wanted = self.gather_objects((topology, columns))
        if len(set(wanted)) > 1:
            raise ValueError(f"The ranks differ in (topology, torus_columns): {wanted}.")
        return Torus(self.world_size, columns) if topology == "torus2d" else None

    def _exchange_within(self, ranks_of: Callable[[int], list[int]]) -> GlooExchange | NcclExchange:
        """Returns the exchange among this rank's own ones of the groups into which ``ranks_of`` divides all ranks."""
        backend = "gloo" if self._nccl is None else "nccl"
        divided = dict.fromkeys(tuple(ranks_of(rank)) for rank in range(self.world_size))
        groups = {ranks: self._new_group(backend, list(ranks)) for ranks in divided}  # all ranks create all groups
        own = groups[tuple(ranks_of(self.rank))]
        return GlooExchange(own, self.watch) if self._nccl is None else NcclExchange(own, self.device)

    def _exchange_bytes(self, kind: str, own: Sequence[int], read: Callable[[Tensor], T]) -> Handle[T]:
        """Tells all ranks some bytes of this rank; ``read`` gets those of all, shape ``[world_size, len(own)]``."""
        self._issue(kind, len(own) * (self.world_size - 1))
        of_ranks = torch.zeros(self.world_size, len(own), dtype=torch.uint8)
        of_ranks[self.rank] = torch.tensor(own, dtype=torch.uint8)
        peers = [peer for peer in range(self.world_size) if peer != self.rank and own]
        exchange = self._gloo.all_to_all(
            dict.fromkeys(peers, of_ranks[self.rank]), {peer: of_ranks[peer] for peer in peers}
        )

        def wait() -> T:
            exchange.finish()
            return read(of_ranks)

        return self._handle(kind, wait)

    def _check(self, flat: Tensor, codec: str | Codec, mean: bool = False) -> Codec:
        codec = get_codec(codec)
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"A collective takes a 1-D contiguous tensor, got shape {tuple(flat.shape)}.")
        if self._torus is not None and not codec.lossless:
            raise ValueError(
                f"A 2-D torus sums in two directions, and carries nothing compressed: {codec} does not fit."
            )
        if not flat.is_floating_point() and (mean or not codec.lossless):
            raise ValueError(f"A tensor of {flat.dtype} cannot be averaged or compressed; sum it with codec='none'.")
        return codec

    def _issue(self, kind: str, num_bytes: int) -> None:
        """Counts an operation that is about to start."""
        if not self._groups:
            raise RuntimeError("The transport is closed.")
        self.traffic.count(kind, num_bytes)

    def _contribution_bytes(self, flat: Tensor, codec: Codec) -> int:
        """What a rank sends in a reduce-scatter: to each other rank its slice."""
        peers = (rank for rank in range(self.world_size) if rank != self.rank)
        return sum(codec.wire_bytes(shard_of(flat, rank, self.world_size).numel(), flat.dtype) for rank in peers)

    def _gather_bytes(self, flat: Tensor, codec: Codec) -> int:
        """What a rank sends in an all-gather: its own slice to each other rank; or, around a ring, others' as large."""
        return codec.wire_bytes(self.shard(flat).numel(), flat.dtype) * (self.world_size - 1)

    def _staged(self, flat: Tensor) -> bool:
        return flat.is_cuda and self._nccl is None

    def _launch(self, kind: str, flat: Tensor, start: Callable[[Tensor], Callable[[], Tensor]]) -> Handle[Tensor]:
        if self.world_size == 1:
            return self._handle(kind, lambda: flat)
        if not self._staged(flat):
            return self._handle(kind, start(flat))
        host = flat.cpu()
        wait = start(host)

        def wait_and_copy() -> Tensor:
            result = wait()
            flat.copy_(host)
            return flat if result is host else self.shard(flat)

        return self._handle(kind, wait_and_copy)

    def _handle(self, kind: str, wait: Callable[[], T]) -> Handle[T]:
        def counted() -> T:
            with self.traffic.waiting(kind):
                return wait()

        return Handle(counted)

    def _finish(self, work: dist.Work | None, what: str, peer: int | None = None) -> None:
        assert work is not None
        with self.watch.waiting(what, peer):
            work.wait(self._timeout)
