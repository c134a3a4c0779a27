"""Messages between the ranks of a Gloo process group."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.faults.failure import PeerWatch, Waiting

#: The tag of no message.
UNUSED_TAG = 2**31 - 1


class Messages:
    """Sends to and receives from peers, by rank in the group. Messages between two ranks keep their order.

    Every method raises RuntimeError, which names the rank at fault, if a process has died or does not answer in time.

    Args:
        group: the process group.
        tag: distinguishes these messages from others in flight.
        watch: has the timeout of a message, and names the rank at fault if it does not arrive.
        ahead: whether a thread receives messages before this rank needs them, see :meth:`awaiting`.
        timeout: the time to wait for a message, after which all waits of the group end; None: the watch's.

    Attributes:
        arrivals: what this rank waits for when it receives from a peer, and the peer's rank in the job, by peer.
        deliveries: the same when it sends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        watch: PeerWatch,
        *,
        ahead: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self._group, self._tag, self._watch, self._ahead = group, tag, watch, ahead
        self.timeout = timeout or watch.timeout
        self.rank, self.world_size = group.rank(), group.size()
        self._ranks = ranks_of(group)
        self.arrivals = [(f"a message from rank {rank}", rank) for rank in self._ranks]
        self.deliveries = [(f"the delivery of a message to rank {rank}", rank) for rank in self._ranks]

    def tagged(self, tag: int) -> Messages:
        messages = object.__new__(Messages)
        messages.__dict__ = {**self.__dict__, "_tag": tag}
        return messages

    def start_receiving(self, tensor: Tensor, peer: int) -> dist.Work:
        try:
            return self._group.recv([tensor], peer, self._tag)  # irecv takes ten calls to come here
        except RuntimeError:
            with self._receiving(peer):
                raise

    def start_sending(self, tensor: Tensor, peer: int) -> dist.Work:
        """Posts a send of the contiguous ``tensor``, which must not change until :meth:`wait_sent`."""
        try:
            return self._group.send([tensor], peer, self._tag)
        except RuntimeError:
            with self._sending(peer):
                raise

    def wait_received(self, work: dist.Work, peer: int) -> None:
        with self._receiving(peer):
            work.wait(self.timeout)

    def wait_sent(self, work: dist.Work, peer: int) -> None:
        with self._sending(peer):
            work.wait(self.timeout)

    def waiting(self) -> Waiting:
        """Returns a context to wait in for several works, to which whoever waits tells of which peer each one is."""
        return Waiting(self._watch, "messages", None, self._ahead)

    def awaiting(self, peer: int) -> AbstractContextManager[object]:
        """Context in which this rank waits for a message that a thread receives from ``peer``."""
        return self._watch.waiting(*self.arrivals[peer])

    def failed_receive(self, error: Exception, peer: int) -> RuntimeError:
        """Returns the error that names the rank at fault for a message from ``peer`` that does not arrive."""
        return self._watch.failed_wait(*self.arrivals[peer], error)

    def is_known_lost(self, peer: int) -> bool:
        """Returns whether a rank has told that ``peer`` has raised or fallen silent."""
        fault = self._watch.fault
        return fault is not None and fault.rank == self._ranks[peer] and fault.kind in ("raised", "silent")

    def end_waits(self) -> None:
        end_waits(self._group)

    def _receiving(self, peer: int) -> Waiting:
        return Waiting(self._watch, *self.arrivals[peer], self._ahead)

    def _sending(self, peer: int) -> Waiting:
        return Waiting(self._watch, *self.deliveries[peer])


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Returns a group's ranks in the default process group; in itself if ``torch.distributed`` does not know it."""
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else list(range(group.size()))


def end_waits(group: dist.ProcessGroup) -> None:
    """Ends all waits of a Gloo group with an error, for good: that is what Gloo does when one of them times out."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # one whose connection is closed already fails at once, and ends nothing else
                group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
