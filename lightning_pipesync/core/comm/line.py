"""A group of ranks of several jobs, one of each, which ``torch.distributed`` does not know."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_pipesync.core.comm.messages import end_waits
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.jobs import split_address
from lightning_pipesync.core.torch_private import new_gloo_group

#: Seconds between two questions whether all have come, and between two looks whether those that have not are alive.
POLL_S, LOOK_S = 0.01, 0.5

#: Seconds in which a living host accepts a connection.
CONNECT_S = 5.0

#: Seconds in which it does so if it is one of many.
ANSWER_S = 1.0

#: Seconds in which all ranks of a line connect once all have come: a rank that dies in between cannot be told apart.
MESH_S = 30.0

#: The key by which a rank tells those that wait for it in a line that it does not come.
GIVEN_UP = "given up"


def open_store() -> dist.TCPStore:
    """Returns a store of this process, in which the ranks of a line can meet; its port is a free one."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def is_open(stores: Sequence[str]) -> bool:
    """Returns whether one of these stores accepts a connection: then its process lives, though it may be frozen.

    Looks for :data:`CONNECT_S` seconds at most, if many hosts do not answer at all.
    """
    begin = time.monotonic()
    for store in stores:
        if time.monotonic() - begin > CONNECT_S:
            break
        with suppress(OSError):
            socket.create_connection(split_address(store), ANSWER_S).close()
            return True
    return False


def give_up(stores: Sequence[str], key: str) -> None:
    """Tells those that wait in a line that this rank does not come; arguments as of :class:`Line`."""
    with suppress(RuntimeError):
        _join(stores[0], key, timedelta(seconds=CONNECT_S)).set(GIVEN_UP, "")


class Line:
    """A Gloo group of one rank of each job.

    Attributes:
        group: the process group.
        rank: this process in it.
        size: number of processes.
        watch: has the timeout; it does not know who is at fault.

    Args:
        stores: ``host:port`` of the store of each job, in the order of the ranks; they meet in the first one.
        key: of no other line in these stores.
        timeout: after which a peer that does not answer counts as lost.

    Raises:
        DistStoreError: one of the others is lost.
    """

    def __init__(self, stores: Sequence[str], rank: int, key: str, timeout: timedelta) -> None:
        self.rank, self.size = rank, len(stores)
        self.watch = PeerWatch(timeout, end_waits=self.end_waits)
        store = _join(stores[0], key, timeout)
        self._meet(store, stores, timeout)
        address, connect = split_address(stores[rank])[0], timedelta(seconds=MESH_S)
        try:
            self.group = new_gloo_group(store, rank, self.size, timeout, address, connect)
        except RuntimeError as error:
            raise dist.DistStoreError(f"not all have connected: {error}") from error

    def end_waits(self) -> None:
        end_waits(self.group)

    def close(self) -> None:
        """Closes the connections, also to one that does not answer."""
        with suppress(RuntimeError):
            self.end_waits()

    def _meet(self, store: dist.Store, stores: Sequence[str], timeout: timedelta) -> None:
        """Waits for all others, as long as they live: making a group would wait for the dead, too."""
        store.set(f"come/{self.rank}", "")
        missing, begin, looked = set(range(self.size)), time.monotonic(), time.monotonic()
        while missing := {rank for rank in missing if not store.check([f"come/{rank}"])}:
            now = time.monotonic()
            if store.check([GIVEN_UP]):
                raise dist.DistStoreError("another rank has given up")
            if now - begin > timeout.total_seconds():
                raise dist.DistStoreError("not all have come")
            if now - looked > LOOK_S:
                for rank in missing:
                    _look_for(stores[rank])
                looked = now
            time.sleep(POLL_S)


def _join(store: str, key: str, timeout: timedelta) -> dist.Store:
    _look_for(store)
    return dist.PrefixStore(key, dist.TCPStore(*split_address(store), timeout=timeout))


def _look_for(store: str) -> None:
    """Raises a DistStoreError if the process that has opened a store is dead, or its host cannot be reached."""
    try:
        socket.create_connection(split_address(store), CONNECT_S).close()
    except OSError as error:
        raise dist.DistStoreError(f"the store at {store} cannot be reached: {error}") from error
