"""Replicas that are jobs of their own in a test: each launched process is one, and a lighthouse tells who is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support import lost_ranks
from tests.support.harness import free_port, launch, on_ranks
from tests.support.lost_ranks import die

#: Seconds without a sign of life after which a process counts as dead: a busy machine may hold one up for some.
SILENCE_S = 5
#: Seconds that those who live are waited for: what is waited for happens long before.
TIMEOUT_S = 120
#: The steps before which a job dies, and before which the others wait for it to start again.
DIES, WAITS = 3, 6


def _run(function: Callable[..., Any], address: str, number: int, ports: Sequence[int], args: tuple[Any, ...]) -> Any:
    """Calls a function on a process of a replica, which has several if it has a port of its own."""
    replica, rank = divmod(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // (len(ports) or 1))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not ports:
            os.environ.pop(name, None)
    if ports:
        size = int(os.environ["WORLD_SIZE"]) // len(ports)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(ports[replica])}
    else:
        replica = rank
    become_replica(address, replica, number)
    return function(replica, *args)


def become_replica(address: str, replica: int, number: int) -> None:
    """Makes this process a replica of this name, of ``number`` with which training begins."""
    os.environ |= {
        "PIPESYNC_LIGHTHOUSE": address,
        "PIPESYNC_REPLICA": str(replica),
        "PIPESYNC_NUM_REPLICAS": str(number),
    }
    torch.set_num_threads(1)


def as_replica(function: Callable[..., Any], address: str, number: int) -> Any:
    """Calls a function on a process that is a replica, of ``number`` with which training begins."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    become_replica(address, rank, number)
    return function(rank) if rank < number else None


@contextmanager
def lighthouse(port: int = 0, wait_for_frozen_s: int = TIMEOUT_S) -> Iterator[str]:
    """Context with a lighthouse in this process; returns its address.

    It waits for ``wait_for_frozen_s`` seconds for a replica that lives, and does not ask.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=wait_for_frozen_s * 1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=SILENCE_S * 1000,
    )
    try:
        yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def launch_replicas(
    function: Callable[..., Any],
    replicas: int,
    *args: Any,
    num_replicas: int | None = None,
    ranks_per_replica: int = 1,
    **settings: Any,
) -> list[Any]:
    """Calls ``function(replica, *args)`` in the processes of replicas; ``settings`` as of :func:`launch`.

    Training begins with ``num_replicas``, None: with all of them. Those of one process have no process group yet; the
    ranks of others find each other by their environment.
    """
    with lighthouse() as address:
        ports = [free_port() for _ in range(replicas)] if ranks_per_replica > 1 else []
        number, processes = num_replicas or replicas, replicas * ranks_per_replica
        start = launch if "may_die" in settings else on_ranks
        return start(_run, processes, function, address, number, ports, args, init=False, **settings)


def wait_for(path: Path) -> None:
    """Waits for a file that another replica writes."""
    lost_ranks.wait_for(path.exists, TIMEOUT_S, f"nobody has written {path.name}")


def dies_and_comes_back(rank: int, victim: int, last: int, directory: Path) -> tuple[int, Callable[[int], None]]:
    """Returns the job of a process, and what is called before each of its steps.

    Job `victim` dies before step `DIES`, and the process `last` is that job when it comes back; it starts before step
    `WAITS`, for which the others wait until a file `started` is there.
    """
    comes_back = rank == last
    if comes_back:
        rank = victim
        os.environ["PIPESYNC_REPLICA"] = str(victim)
        wait_for(directory / "going on")

    def before_step(step: int) -> None:
        if rank == victim and step == DIES and not comes_back:
            die()
        if step == WAITS and not comes_back:  # they have had a round without it
            (directory / "going on").touch()
            wait_for(directory / "started")

    return rank, before_step
