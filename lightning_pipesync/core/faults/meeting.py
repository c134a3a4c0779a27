"""The meeting of all ranks, before they make process groups, and the watch over a job until then.

[Note: making a group blocks the store]
A rank that makes a process group waits in the store for the addresses of all others: for the group's whole timeout if
one of them has raised or died. Meanwhile its process cannot call the store, so that it does not learn of that, and is
silent. So all ranks meet before: in a barrier of the default process group, which breaks at once if a process dies, or,
if that group is not Gloo's, by asking the store repeatedly.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from weakref import WeakSet

import torch.distributed as dist

from lightning_pipesync.core.comm.messages import end_waits
from lightning_pipesync.core.faults.failure import KNOWN, PeerWatch
from lightning_pipesync.core.faults.heartbeat import INTERVAL
from lightning_pipesync.core.torch_private import store_of

#: The time between two questions, as a fraction of the time waited so far, and the least: most waits are short.
FRACTION_OF_WAIT, SHORTEST_S = 1 / 20, 0.001

#: The watches of adapters, of which one may be open.
_of_jobs: WeakSet[PeerWatch] = WeakSet()


def watch_job(timeout: timedelta) -> PeerWatch:
    """Starts to watch all ranks, as soon as there is a default process group; a collective call.

    If a rank is lost, waits in that group end, too. Close the watch when the job ends. ``timeout`` is the time after
    which a rank that does not answer counts as lost.
    """
    for former in list(_of_jobs):
        former.close()  # of an adapter of this process that is not used any more
    group = dist.group.WORLD
    assert group is not None
    watch = PeerWatch(timeout, end_waits=lambda: end_waits(group))
    _of_jobs.add(watch)
    with suppress(RuntimeError):  # rank 0 may have ended already, and nobody need wait for it
        watch.start(group)
    return watch


def meet(timeout: timedelta) -> None:
    """Waits for all ranks, see [Note: making a group blocks the store]; a collective call.

    Raises:
        RuntimeError: a rank is known to be lost, or has not come within ``timeout``; it is named.
    """
    group = dist.group.WORLD
    assert group is not None
    if group.size() == 1:
        return
    if of_job := [watch for watch in list(_of_jobs) if watch.is_open]:
        _meet(group, timeout, of_job[0])
        return
    watch = PeerWatch(timeout)
    watch.start(group)
    try:
        _meet(group, timeout, watch)
    finally:
        watch.close()


def _meet(group: dist.ProcessGroup, timeout: timedelta, watch: PeerWatch) -> None:
    begin, store = time.monotonic(), store_of(group)
    with watch.waiting("all ranks to attach a method"):
        barrier = dist.barrier(async_op=True) if dist.get_backend() == "gloo" else None
        if barrier is None:
            number = watch.ask_store(lambda: store.add(f"pipesync/meetings/{group.rank()}", 1))
            come = f"pipesync/meeting/{number}"
            watch.ask_store(lambda: store.add(come, 1))
        while not (barrier.is_completed() if barrier else watch.ask_store(lambda: store.add(come, 0)) == group.size()):
            waited_s = time.monotonic() - begin
            if watch.fault is not None:
                raise dist.DistStoreError(KNOWN)
            if waited_s > timeout.total_seconds():
                raise dist.DistStoreError("not all have come")
            time.sleep(min(INTERVAL, max(SHORTEST_S, waited_s * FRACTION_OF_WAIT)))
        if barrier is not None:
            barrier.wait()
