"""The transport: all communication of a method, over process groups that nothing else uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.comm.channel import MessageReceiver, MessageSender
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.gloo import NUM_TAGS, GlooExchange
from lightning_pipesync.core.comm.groups import ProcessGroups
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.line import Line
from lightning_pipesync.core.comm.mail import Mail
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.nccl import NcclExchange
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.comm.topology import Topology
from lightning_pipesync.core.comm.torus import Torus, TorusExchange
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.tree import DoubleTree, TreeExchange
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.faults.meeting import meet
from lightning_pipesync.core.faults.shutdown import destroy_process_groups_at_shutdown

#: Maximum seconds to wait for what is under way when the ranks change: they may be lost.
CLOSE_S = 1.0

#: No timeout; Gloo counts in nanoseconds.
FOREVER = timedelta(days=365)


class Transport(Collectives):
    """Asynchronous collectives and messages among the ranks of the default process group, or among replicas.

    Attributes:
        job: objects and states of all ranks of the default process group.
        shards: collectives, over Gloo, among the ranks that hold this rank's replica; None: it is this rank alone.
        row: collectives among this rank and its neighbors, with ``topology="rows"``, else None.
        column: collectives among the ranks with the same place in their rows, with ``topology="rows"``, else None.

    Args:
        device: of the tensors.
        timeout_s: seconds after which a peer that does not answer counts as lost.
        backend: ``"gloo"`` or ``"nccl"``; ``None`` picks NCCL for CUDA devices if available, else Gloo.
        topology: ``"flat"``: every rank exchanges with every other. ``"torus2d"``: along rows, then along columns,
            which alone use the codec. ``"auto"``: with a lossy codec, where each of several hosts has the same number
            of neighboring ranks, two or more, as ``"torus2d"`` with a row for each host; otherwise as ``"flat"``.
            ``"tree"``: reduce and broadcast on two binary trees, over Gloo, see :mod:`.tree`; the broadcast alone uses
            the codec. ``"rows"``: as ``"flat"``, and there are :attr:`row` and :attr:`column`.
        torus_columns: neighboring ranks in a row; None: as square as possible.
        codec: what tensors will be exchanged with, for ``"auto"``.
        replicas: the dimension of a device mesh along which the model is replicated, or its ranks: they hold the same
            shard; None: all ranks hold the whole model. Then ``"auto"`` is ``"flat"``.
        readers: the ranks of this rank's replica that get different data, this one included; None: all of them do.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, or a rank did not connect in time.
        ValueError: ``timeout_s`` is not positive, the backend does not fit the device, the ranks cannot form the torus,
            or they differ in the topology; ``replicas`` has several dimensions, or not all ranks are in such a mesh.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        timeout_s: float = 1800.0,
        backend: str | None = None,
        topology: str = "flat",
        torus_columns: int | None = None,
        codec: str | Codec = "none",
        replicas: DeviceMesh | Sequence[int] | None = None,
        readers: Sequence[int] | None = None,
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
        self._timeout = timedelta(seconds=timeout_s)
        destroy_process_groups_at_shutdown()
        meet(self._timeout)
        # Flags, objects and single messages use Gloo on the host: reading them must not wait for the device.
        self._groups = groups = ProcessGroups(self.device, self._timeout, replicas)
        self._control = groups.everyone if replicas is None else groups.dividing("gloo", groups.lines)
        traffic = Traffic()
        watch = PeerWatch(self._timeout, lambda: traffic.num_operations, groups.end_waits)
        watch.announces = backend == "nccl"
        self.job = self._objects = Objects(groups.everyone, watch, traffic)
        if self._control is not groups.everyone:
            self._objects = Objects(self._control, watch, traffic)
        gloo, self._messages = GlooExchange(self._control, watch), Messages(self._control, 0, watch)
        super().__init__(dist.get_rank(), groups.lines[dist.get_rank()], gloo, None, traffic, watch)
        self._readers = readers
        self.shards: Collectives | None = None
        if len(self.ranks) < dist.get_world_size():
            self.shards = self._collectives_among(groups.shards, "shards ", over_nccl=False)
        self.row: Collectives | None = None
        self.column: Collectives | None = None
        try:
            self._arrange(topology, torus_columns, not get_codec(codec).lossless)
        except ValueError:
            self.close()
            raise
        groups.connect()
        self.watch.start(groups.everyone)
        # A rank that closes early must not break the connections that a slower one is still making.
        with self.watch.waiting("all ranks to connect"):
            dist.barrier(groups.everyone)

    def exchange_with(self, line: Line) -> None:
        """Exchanges with the ranks of ``line`` from now on, one of each job, in place of those along ``replicas``.

        Collectives, flags, objects, states and single messages are then theirs, over Gloo.
        """
        if self.background is not None:
            self.background.close(CLOSE_S)
            self.background = None
        self.rank, self.world_size, self.ranks = line.rank, line.size, range(line.size)
        self.topology = Topology(line.size)
        self._objects = Objects(line.group, line.watch, self.traffic)
        self._gloo, self._messages = GlooExchange(line.group, line.watch), Messages(line.group, 0, line.watch)
        self._nccl, self._exchange, self.backend, self.waits = None, self._gloo, "gloo", line.watch
        if self.shards is not None:  # a rank that has lost another replica may have ended waits
            self.shards.close(CLOSE_S)
            former = self.shards.group
            self.shards = self._collectives_among(self._groups.shards, "shards ", over_nccl=False)
            self._groups.close(former)

    def end_waits_for_shards(self) -> None:
        """Ends all waits for the ranks that hold this rank's replica; :meth:`exchange_with` makes another group."""
        if self.shards is not None:
            self.shards.end_waits()

    def new_objects(self) -> Objects:
        """Returns objects and states of all ranks of the job, in a group of their own; a collective call."""
        return Objects(self._groups.new("gloo"), self.watch, self.traffic)

    def send(self, tensor: Tensor, dst: int) -> Handle[None]:
        """Sends a contiguous CPU tensor to rank ``dst``, which calls :meth:`recv`; messages keep their order."""
        self._issue("send", tensor.numel() * tensor.element_size())
        work = self._messages.start_sending(tensor, dst)
        return self._handle("send", lambda: self._messages.wait_sent(work, dst))

    def recv(self, tensor: Tensor, src: int) -> Handle[None]:
        """Receives a message of :meth:`send` from rank ``src`` into a contiguous CPU tensor."""
        self._issue("recv", 0)
        work = self._messages.start_receiving(tensor, src)
        return self._handle("recv", lambda: self._messages.wait_received(work, src))

    def channel_to(
        self, dst: int, series: int, *, wire_dtype: torch.dtype | None = None, window: int = 1, what: str = ""
    ) -> MessageSender:
        """Returns the sending end of a channel to a rank, which calls :meth:`channel_from` with the same series.

        Args:
            dst: the rank in the default process group.
            series: the number of the channel, unique among the open channels between the two ranks.
            wire_dtype: the dtype that wider floating-point tensors are sent in; None: their own.
            window: maximum number of messages in flight.
            what: what is sent, for profilers.
        """
        name = f"pipesync-channel-{series}-to"
        return MessageSender(self._series(series), dst, self.device, name, self.traffic, wire_dtype, window, what)

    def channel_from(self, src: int, series: int, *, what: str = "") -> MessageReceiver:
        """Returns the receiving end of a channel from rank ``src`` of the default process group."""
        messages = self._series(series, ahead=True)
        return MessageReceiver(messages, src, self.device, f"pipesync-channel-{series}", self.traffic, what)

    def mail(self) -> Mail:
        """Returns mail among all ranks; a collective call."""

        def messages() -> Messages:
            group = self._groups.new("gloo", ends_waits=False)  # mail loses one rank at a time
            dist.barrier(group)  # its connections are made before the store is used at the same time
            return Messages(group, 0, self.watch, ahead=True, timeout=FOREVER)

        return Mail(messages(), messages(), self.device, self.traffic, self._timeout.total_seconds())

    def gather_objects(self, obj: Any) -> list[Any]:
        """See :meth:`Objects.gather_objects`."""
        return self._objects.gather_objects(obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """See :meth:`Objects.broadcast_object`."""
        return self._objects.broadcast_object(obj, src)

    def collect_states(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """See :meth:`Objects.collect_states`."""
        return self._objects.collect_states(state)

    def send_state(self, state: dict[str, Any], dst: int) -> None:
        """See :meth:`Objects.send_state`."""
        self._objects.send_state(state, dst)

    def receive_state(self, src: int) -> dict[str, Any]:
        """See :meth:`Objects.receive_state`."""
        return self._objects.receive_state(src)

    @property
    def ranks_of_replica(self) -> Sequence[int]:
        """The ranks that hold this rank's replica together."""
        return [dist.get_rank()] if self.shards is None else self.shards.ranks

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that hold a replica together."""
        return len(self.ranks_of_replica)

    @property
    def place_of_data(self) -> tuple[int, int]:
        """The place of this rank's data, and their number: those of ranks that hold no shards of the same layers."""
        return self.place_of_data_among(self.rank, self.world_size)

    def place_of_data_among(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns :attr:`place_of_data` as ``rank`` of ``world_size`` replicas."""
        own = dist.get_rank()
        readers = self.ranks_of_replica if self._readers is None else self._readers
        return rank * len(readers) + readers.index(own), world_size * len(readers)

    def sum_over_shards(self, value: float) -> float:
        """Returns the sum of what the ranks of a replica have, the same on all of them; a call of all of them."""
        if self.shards is None:
            return value
        return self.shards.all_reduce(torch.tensor([value], dtype=torch.float64)).wait().item()

    def end_other_waits(self, groups: Iterable[dist.ProcessGroup] = ()) -> None:
        """Has waits in the default process group, and in ``groups`` of another library, end, too, if a rank is lost.

        Only those of Gloo.
        """
        self._groups.others += [group for group in (dist.group.WORLD, *groups) if group is not None]

    def keep_other_groups(self) -> None:
        """Undoes :meth:`end_other_waits`: after an error of the method the caller goes on to use those groups."""
        self._groups.others.clear()

    def new_group(self) -> dist.ProcessGroup:
        """Returns a process group for a library that communicates by itself; a collective call.

        Its ranks are those that hold this rank's replica; all ranks, if there are no others.
        """
        groups = self._groups
        return groups.dividing(self.backend, groups.lines if self.shards is None else groups.shards)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and the process groups; waits at most ``timeout_s`` seconds for operations in flight.

        If an exception is being handled, the other ranks learn of it.
        """
        self.watch.close()
        for collectives in (self.row, self.column, self.shards):
            if collectives is not None:
                collectives.close(timeout_s)
        super().close(timeout_s)
        self._groups.destroy(timeout_s)

    def _series(self, number: int, *, ahead: bool = False) -> Messages:
        # Tags that the collectives, which use the same group, do not use.
        return Messages(self._groups.everyone, 2 * NUM_TAGS + number, self.watch, ahead=ahead)

    def _arrange(self, topology: str, num_columns: int | None, lossy: bool) -> None:
        wanted, lossy_everywhere = zip(*self.gather_objects(((topology, num_columns), lossy)), strict=True)
        if len(set(wanted)) > 1:
            raise ValueError(f"The ranks differ in (topology, torus_columns): {[*wanted]}.")
        if topology == "tree" and self.backend == "nccl":
            raise ValueError(
                f"topology='tree' sends messages over Gloo, and tensors on {self.device} are exchanged over NCCL, "
                "which has no reduce and broadcast on trees: set topology='flat' or 'torus2d'."
            )
        if self.backend == "nccl":
            self._nccl = self._exchange = self._nccl_among(self._groups.lines)
        if topology == "flat" or (topology == "auto" and not all(lossy_everywhere)):
            return
        if topology == "tree":
            self.topology = tree = DoubleTree(self.world_size)
            self._gloo = self._exchange = TreeExchange(tree, self._control, self.watch)
            return
        if len(self.ranks) < dist.get_world_size():
            if topology == "auto":
                return
            raise ValueError(f"topology={topology!r} is one of all ranks, and replicas= has some: use topology='flat'.")
        grid = Torus.of_hosts(self._groups.hosts) if topology == "auto" else Torus(self.world_size, num_columns)
        if grid is None:
            return
        rows, columns = ([of(rank) for rank in range(self.world_size)] for of in (grid.row_of, grid.column_of))
        if topology == "rows":
            self.row = self._collectives_among(rows, "row ", over_nccl=self._nccl is not None)
            self.column = self._collectives_among(columns, "", over_nccl=self._nccl is not None)
        else:
            among = self._gloo_among if self._nccl is None else self._nccl_among
            self.topology, self._exchange = grid, TorusExchange(grid, self.rank, among(rows), among(columns))

    def _collectives_among(self, divided: Sequence[Sequence[int]], kind: str, over_nccl: bool) -> Collectives:
        """Returns collectives among the ranks that ``divided``, by rank, puts together with this one."""
        gloo, nccl = self._gloo_among(divided), self._nccl_among(divided) if over_nccl else None
        own = dist.get_rank()
        return Collectives(own, divided[own], gloo, nccl, self.traffic, self.watch, kind)

    def _gloo_among(self, divided: Sequence[Sequence[int]]) -> GlooExchange:
        return GlooExchange(self._groups.dividing("gloo", divided), self.watch)

    def _nccl_among(self, divided: Sequence[Sequence[int]]) -> NcclExchange:
        group = self._groups.dividing("nccl", divided)
        return NcclExchange(group, self.device, self._groups.share_a_host(divided[dist.get_rank()]))
