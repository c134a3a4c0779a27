"""The process groups of a transport.

[Note: Gloo's loop]
A thread of Gloo holds the lock of a connection while it writes to it. Gloo's loop only tries to take that lock: it asks
for events again and again until the lock is free. On a host of several ranks each write wakes up another rank's loop,
which may preempt the writer before it has let go of the lock; then its own loop spins for as long. An all-reduce of 256
KiB among 4 ranks on two cores asked 1000 to 3000 times, for half of its processor time. So the loops have Linux' policy
for batch jobs: their share of the time is the same, but they preempt nobody when they wake up.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipesync.core.comm.messages import end_waits
from lightning_pipesync.core.comm.nccl import destroy_nccl_groups, new_nccl_group
from lightning_pipesync.core.faults.shutdown import error_at_shutdown, join_thread

#: After the timeout its watchdog aborts the process: what the watch of the ranks says comes before.
LATER = timedelta(seconds=60)


class DifferentLinesError(ValueError):
    """The ranks are in no lines, or do not agree on them."""


class ProcessGroups:
    """Process groups that nothing else uses. All ranks make all of them, in the same order.

    Attributes:
        others: groups of another library, in which this rank may wait, too.
        everyone: a Gloo group of all ranks of the default process group.
        lines: for each rank of the default process group, the ranks along its line of ``replicas``.
        hosts: the name of the host of each rank.

    Args:
        device: of tensors that NCCL's groups exchange.
        timeout: after which a peer that does not answer counts as lost.
        replicas: a dimension of a device mesh, or its ranks; None: all ranks are in one line.

    Raises:
        DifferentLinesError: on every rank: the ranks do not agree on the lines.
    """

    lines: list[Sequence[int]]
    hosts: list[str]

    def __init__(self, device: torch.device, timeout: timedelta, replicas: DeviceMesh | Sequence[int] | None) -> None:
        self._device, self._timeout = device, timeout
        self._groups: list[dist.ProcessGroup] = []
        self._kept_waiting: list[dist.ProcessGroup] = []
        self.others: list[dist.ProcessGroup] = []
        self.everyone = self.new("gloo")
        own: Sequence[int] = range(dist.get_world_size())
        if isinstance(replicas, DeviceMesh):
            own = replicas.mesh.tolist() if replicas.ndim == 1 else []
        elif replicas is not None:
            own = list(replicas)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (own, socket.gethostname()), group=self.everyone)
        self.lines, self.hosts = map(list, zip(*gathered, strict=True))
        agreed = (
            rank in line and all(self.lines[other] == line for other in line) for rank, line in enumerate(self.lines)
        )
        if not all(agreed):
            self.destroy(0.0)
            raise DifferentLinesError(
                "replicas must be one dimension of a device mesh of all ranks, such as replicas=mesh['replicas'], and "
                f"the same on all: this rank has {replicas}."
            )

    @property
    def shards(self) -> list[list[int]]:
        """For each rank the ranks that are at the same place in their lines: those of its replica."""
        place = {rank: line.index(rank) for line in self.lines for rank in line}
        return [[other for other in sorted(place) if place[other] == place[rank]] for rank in sorted(place)]

    def new(self, backend: str, ranks: Sequence[int] | None = None, ends_waits: bool = True) -> dist.ProcessGroup:
        """Returns a group of ``ranks``, all if None.

        Args:
            ends_waits: whether :meth:`end_waits` ends those of this group, too.
        """
        members = None if ranks is None else list(ranks)
        if backend == "nccl":
            several_hosts = self.num_hosts(range(dist.get_world_size()) if ranks is None else ranks) > 1
            group = new_nccl_group(members, self._device, self._timeout + LATER, several_hosts)
        else:
            with making_patient_threads():
                group = dist.new_group(members, backend=backend, timeout=self._timeout)
        if ranks is None or dist.get_rank() in ranks:
            self._groups.append(group)
            if not ends_waits:
                self._kept_waiting.append(group)
        return group

    def dividing(self, backend: str, divided: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Returns this rank's group, of those into which ``divided`` puts each rank of the default process group."""
        if len(divided[0]) == len(divided):
            return self.new(backend)
        groups = {ranks: self.new(backend, ranks) for ranks in dict.fromkeys(map(tuple, divided))}
        return groups[tuple(divided[dist.get_rank()])]

    def close(self, group: dist.ProcessGroup) -> None:
        """Closes the connections of one of Gloo's groups, in which this rank waits for no other; no collective call."""
        self._groups.remove(group)
        with suppress(Exception):  # fails if a peer has died
            dist.destroy_process_group(group)

    def num_hosts(self, ranks: Sequence[int]) -> int:
        return len({self.hosts[rank] for rank in ranks})

    def share_a_host(self, ranks: Sequence[int]) -> bool:
        """Returns whether several of ``ranks`` are on one host."""
        return self.num_hosts(ranks) < len(ranks)

    def connect(self) -> None:
        """Makes all connections of Gloo's groups: they are in use before the store is used at the same time."""
        for group in self._groups:
            if dist.get_backend(group) == "gloo":
                dist.barrier(group)

    def end_waits(self) -> None:
        """Ends all waits with an error, but those of NCCL, and of groups that were made otherwise."""
        for group in [group for group in (*self._groups, *self.others) if group not in self._kept_waiting]:
            if group.name() == "gloo":
                end_waits(group)

    def destroy(self, timeout_s: float) -> None:
        """Destroys the groups; waits at most ``timeout_s`` seconds for NCCL's operations in flight."""
        nccl = [group for group in self._groups if dist.get_backend(group) == "nccl"]
        if nccl:
            after_error = error_at_shutdown() is not None
            thread = Thread(target=destroy_nccl_groups, args=(nccl, after_error), name="pipesync-end", daemon=True)
            thread.start()
            join_thread(thread, timeout_s)
        for group in self._groups:
            if group not in nccl:
                with suppress(Exception):  # fails if a peer has died
                    dist.destroy_process_group(group)
        self._groups.clear()


@contextmanager
def making_patient_threads() -> Iterator[None]:
    """Context in which new threads of this one preempt nobody when they wake up, see [Note: Gloo's loop]."""
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:  # the user has chosen another policy
        yield
        return
    present = os.sched_getparam(0)
    with suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, present)
