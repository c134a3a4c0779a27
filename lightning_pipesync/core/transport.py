"""The transport: all communication of a method, over process groups that nothing else uses.

[Note: one order]
Every rank must issue the same operations in the same order. So no operation may depend on the gradients of one rank
alone: the ranks first exchange their flags (:meth:`Transport.exchange_flags`), then all take the same decision.
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

from lightning_pipesync.core.buckets import shard_slice
from lightning_pipesync.core.channel import MessageReceiver, MessageSender
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.failure import PeerWatch
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.gloo import NUM_TAGS, Between, GlooExchange
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.messages import Messages
from lightning_pipesync.core.nccl import NcclExchange
from lightning_pipesync.core.shutdown import destroy_process_groups_at_shutdown
from lightning_pipesync.core.torch_private import foreach_copy_
from lightning_pipesync.core.torus import Torus, TorusExchange
from lightning_pipesync.core.traffic import Traffic

T = TypeVar("T")


class Transport:
    """Asynchronous collectives and messages among the ranks of the default process group.

    Tensors are 1-D and contiguous; the collectives work in place. The number of values need not be a multiple of the
    number of ranks. CPU tensors use Gloo. CUDA tensors use NCCL, or, with ``backend="gloo"``, Gloo through the host.

    Attributes:
        rank: this process, in ``range(world_size)``.
        world_size: number of processes.
        device: the device of the tensors.
        backend: ``"gloo"`` or ``"nccl"``, which carries them.
        traffic: bytes sent and seconds waited, per kind of operation.
        watch: names the rank at fault when a wait times out.

    Args:
        device: the device of the tensors.
        timeout_s: seconds after which a peer that does not answer counts as lost.
        backend: ``"gloo"`` or ``"nccl"``; ``None`` picks NCCL for CUDA devices if available, else Gloo.
        topology: ``"flat"``: every rank exchanges with every other. ``"torus2d"``: along rows, then along columns;
            without compression.
        torus_columns: neighboring ranks in a row of the torus; None: as square as possible.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, or a rank did not connect in time.
        ValueError: ``timeout_s`` is not positive, the backend does not fit the device, the ranks cannot form the torus,
            or they differ in the topology.
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
        if self.device.type == "cuda" and self.device.index is None:  # a thread has a current device of its own
            self.device = torch.device("cuda", torch.cuda.current_device())
        backend = backend or ("nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo")
        if backend not in ("gloo", "nccl") or (backend == "nccl" and self.device.type != "cuda"):
            raise ValueError(
                f"backend={backend!r} cannot carry tensors on {self.device}: use 'gloo', or 'nccl' on CUDA."
            )
        self.backend = backend
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.traffic = Traffic()
        self._groups: list[dist.ProcessGroup] = []
        self._timeout = timedelta(seconds=timeout_s)
        destroy_process_groups_at_shutdown()
        # Flags, objects and single messages use Gloo on the host: reading them must not wait for the device.
        self._control = self._new_group("gloo")
        self.watch = PeerWatch(self._timeout, lambda: self.traffic.num_operations)
        self._gloo = GlooExchange(self._control, self.watch)
        self._nccl = NcclExchange(self._new_group("nccl"), self.device) if backend == "nccl" else None
        self._exchange: GlooExchange | NcclExchange | TorusExchange = self._nccl or self._gloo
        try:
            self._torus = self._make_torus(topology, torus_columns)
        except ValueError:
            self.close()
            raise
        if self._torus is not None:
            row, column = self._exchange_within(self._torus.row_of), self._exchange_within(self._torus.column_of)
            self._exchange = TorusExchange(self._torus, self.rank, row, column)
        for group in self._groups:
            if dist.get_backend(group) == "gloo":
                dist.barrier(group)  # its connections are in use before the store is used at the same time
        self.watch.start(self._control)
        # A rank that closes early must not break the connections that a slower one is still making.
        with self.watch.waiting("all ranks to connect"):
            dist.barrier(self._control)

    def reduce_scatter(
        self, flat: Tensor, *, codec: str | Codec = "none", mean: bool = False, feedback: ErrorFeedback | None = None
    ) -> Handle[Tensor]:
        """Sums ``flat`` over the ranks; each rank gets a slice of the sum.

        Args:
            flat: 1-D contiguous tensor, not to be used until the handle has been waited for. Then this rank's
                :meth:`shard` of it holds the sum and the rest is undefined.
            codec: the wire format. The owner of a slice decodes and sums in fp32 (fp64 for fp64).
            mean: whether to divide the sum by the number of ranks.
            feedback: the residuals of this buffer, for error feedback.

        Returns:
            A handle of this rank's slice, of shape ``[ceil(numel / world_size)]``, or less on the last ranks.
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
        between: Between | None = None,
    ) -> Handle[Tensor]:
        """Sums ``flat`` over the ranks in place: a reduce-scatter, then an all-gather, both in the background.

        Args:
            between: changes this rank's slice of the sum, in place, before it is gathered; called on another thread.
        """
        codec = self._check(flat, codec, mean)
        self._issue("all_reduce", self._contribution_bytes(flat, codec) + self._gather_bytes(flat, codec))
        if self.world_size == 1 and between is not None:
            between(flat)
        start = self._exchange_of(flat).all_reduce
        return self._launch("all_reduce", flat, lambda t: start(t, codec, mean, feedback, between))

    def exchange_flags(self, flag: int) -> Handle[list[int]]:
        """All-gathers ``flag``, one byte (0 to 255); the handle's result is every rank's flag, by rank."""
        return self._exchange_bytes("flags", [flag], lambda flags: flags[:, 0].tolist())

    def union(self, flags: Sequence[bool]) -> Handle[list[bool]]:
        """Reduces ``flags``, the same number on every rank, by "or" over the ranks.

        This and :meth:`exchange_flags` do not wait for other operations in flight, and may be called on another thread
        than the collectives. Their order must be the same on all ranks, so that two threads may take turns only if one
        waits for the other in between: DeAR's main thread calls when its queue has no operation in flight.
        """
        return self._exchange_bytes("union", flags, lambda of_ranks: of_ranks.bool().any(dim=0).tolist())

    def send(self, tensor: Tensor, dst: int) -> Handle[None]:
        """Sends a contiguous CPU tensor to rank ``dst``, which calls :meth:`recv`; messages keep their order."""
        self._issue("send", tensor.numel() * tensor.element_size())
        work = dist.isend(tensor, dst, self._control)
        return self._handle("send", lambda: self._finish(work, f"rank {dst} to receive a message", dst))

    def recv(self, tensor: Tensor, src: int) -> Handle[None]:
        """Receives a message of :meth:`send` from rank ``src`` into a contiguous CPU tensor."""
        self._issue("recv", 0)
        work = dist.irecv(tensor, src, self._control)
        return self._handle("recv", lambda: self._finish(work, f"a message from rank {src}", src))

    def channel_to(
        self, dst: int, series: int, *, wire_dtype: torch.dtype | None = None, window: int = 1
    ) -> MessageSender:
        """Returns the sending end of a channel to rank ``dst``, which calls :meth:`channel_from` with the same series.

        Args:
            dst: the rank of the receiver.
            series: the number of the channel, unique among the open channels between the two ranks.
            wire_dtype: the dtype that wider floating-point tensors are sent in; None: their own.
            window: the most messages in flight.
        """
        return MessageSender(self._series(series), dst, self.traffic, wire_dtype, window)

    def channel_from(self, src: int, series: int) -> MessageReceiver:
        """Returns the receiving end of a channel from rank ``src``."""
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
        """Returns every rank's ``obj`` (picklable and small), by rank, on all ranks; blocks. Bytes are not counted."""
        objects: list[Any] = [None] * self.world_size
        with self.traffic.waiting("objects"), self.watch.waiting("what all ranks have to tell"):
            dist.all_gather_object(objects, obj, group=self._control)
        return objects

    def collect_states(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Returns every rank's ``state`` on rank 0, by rank, and None elsewhere; blocks.

        The states are sent one after the other. Their tensors are on the CPU.
        """
        buffer = io.BytesIO()
        serialization.save(state, buffer)  # not torch.save, which users may replace to count or redirect files
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
            # From this job's own processes, and possibly with objects that weights_only=True refuses.
            read = io.BytesIO(received.numpy().tobytes())
            states.append(serialization.load(read, map_location="cpu", weights_only=False))
        return states

    def new_group(self) -> dist.ProcessGroup:
        """Returns a process group of all ranks for a library that communicates by itself; a collective call."""
        return self._new_group(self.backend)

    @property
    def gathers_parts(self) -> bool:
        """Whether :meth:`all_gather` can fill a part of each shard."""
        return self._torus is None

    def parts(self, flat: Tensor, part: slice) -> list[Tensor]:
        """Returns a slice of every rank's :meth:`shard`, by rank: views."""
        return [flat[self.shard_slice(flat.numel(), rank)][part] for rank in range(self.world_size)]

    def shard(self, flat: Tensor) -> Tensor:
        """Returns the slice of ``flat`` that this rank owns: a view."""
        return flat[self.shard_slice(flat.numel(), self.rank)]

    def shard_slice(self, numel: int, rank: int) -> slice:
        """Returns the slice of a buffer of ``numel`` values that ``rank`` owns."""
        if self._torus is not None:
            return self._torus.shard_slice(numel, rank)
        return shard_slice(numel, rank, self.world_size)

    def feedback(self, flat: Tensor) -> ErrorFeedback:
        """Returns new residuals for ``flat``, on the device where it is encoded."""
        return ErrorFeedback(flat.cpu() if self._staged(flat) else flat, self.world_size)

    def release_memory(self) -> None:
        """Frees the buffers that are kept for reuse."""
        self._exchange.release_memory()

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and the process groups; waits at most ``timeout_s`` seconds for operations in flight.

        If an exception is being handled, the other ranks learn of it.
        """
        self.watch.close()
        self._exchange.close(timeout_s)
        if self._exchange is not self._gloo:
            self._gloo.close(timeout_s)
        for group in self._groups:
            with suppress(Exception):  # fails if a peer has died
                dist.destroy_process_group(group)
        self._groups.clear()

    def _series(self, number: int, *, ahead: bool = False) -> Messages:
        """Returns messages with a tag that the collectives, which use the same group, do not use."""
        return Messages(self._control, 2 * NUM_TAGS + number, self.watch, ahead=ahead)

    def _new_group(self, backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Returns a group of ``ranks``, all if None; a collective call on all ranks."""
        group = dist.new_group(ranks, backend=backend, timeout=self._timeout)
        if ranks is None or self.rank in ranks:
            self._groups.append(group)
        return group

    def _make_torus(self, topology: str, columns: int | None) -> Torus | None:
        wanted = self.gather_objects((topology, columns))
        if len(set(wanted)) > 1:
            raise ValueError(f"The ranks differ in (topology, torus_columns): {wanted}.")
        return Torus(self.world_size, columns) if topology == "torus2d" else None

    def _exchange_within(self, ranks_of: Callable[[int], list[int]]) -> GlooExchange | NcclExchange:
        """Returns the exchange in this rank's group, one of those that ``ranks_of`` divides all ranks into."""
        backend = "gloo" if self._nccl is None else "nccl"
        divided = dict.fromkeys(tuple(ranks_of(rank)) for rank in range(self.world_size))
        groups = {ranks: self._new_group(backend, list(ranks)) for ranks in divided}  # all ranks create all groups
        own = groups[tuple(ranks_of(self.rank))]
        return GlooExchange(own, self.watch) if self._nccl is None else NcclExchange(own, self.device)

    def _exchange_bytes(self, kind: str, own: Sequence[int], read: Callable[[Tensor], T]) -> Handle[T]:
        """All-gathers bytes; ``read`` makes the result from those of all ranks, shape ``[world_size, len(own)]``."""
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
        """Returns the bytes that a rank sends in a reduce-scatter: to each other rank its slice."""
        numel, world_size = flat.numel(), self.world_size
        slices = (shard_slice(numel, rank, world_size) for rank in range(world_size) if rank != self.rank)
        return sum(codec.wire_bytes(each.stop - each.start, flat.dtype) for each in slices)

    def _gather_bytes(self, flat: Tensor, codec: Codec, part: slice | None = None) -> int:
        """Returns the bytes that a rank sends in an all-gather: as many slices as there are other ranks."""
        own = self.shard_slice(flat.numel(), self.rank)
        numel = own.stop - own.start
        if part is not None:
            numel = len(range(*part.indices(numel)))
        return codec.wire_bytes(numel, flat.dtype) * (self.world_size - 1)

    def _exchange_of(self, flat: Tensor) -> GlooExchange | NcclExchange | TorusExchange:
        """Returns what exchanges a tensor: NCCL carries none of the host, such as a buffer that a user keeps there."""
        return self._exchange if flat.is_cuda or self._nccl is None else self._gloo

    def _staged(self, flat: Tensor) -> bool:
        return flat.is_cuda and self._nccl is None

    def _launch(
        self, kind: str, flat: Tensor, start: Callable[[Tensor], Callable[[], Tensor]], part: slice | None = None
    ) -> Handle[Tensor]:
        if self.world_size == 1:
            return self._handle(kind, lambda: flat)
        if not self._staged(flat):
            return self._handle(kind, start(flat))
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

    def _handle(self, kind: str, wait: Callable[[], T]) -> Handle[T]:
        def counted() -> T:
            with self.traffic.waiting(kind):
                return wait()

        return Handle(counted)

    def _finish(self, work: dist.Work | None, what: str, peer: int | None = None) -> None:
        assert work is not None
        with self.watch.waiting(what, peer):
            work.wait(self._timeout)
