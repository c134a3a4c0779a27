"""Replicas that are jobs of their own in a test: each launched process is one, and a lighthouse tells who is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.harness import launch

#: Seconds without a sign of life after which a process counts as dead: a busy machine may hold one up for some.
SILENCE_S = 5
#: Seconds that those who live are waited for: what is waited for happens long before.
TIMEOUT_S = 120


def _run(function: Callable[..., Any], address: str, number: int, args: tuple[Any, ...]) -> Any:
    """Calls a function on a process of a replica; the process's rank is the replica's name."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ |= {
        "PIPESYNC_LIGHTHOUSE": address,
        "PIPESYNC_REPLICA": str(rank),
        "PIPESYNC_NUM_REPLICAS": str(number),
    }
    torch.set_num_threads(1)
    return function(rank, *args)


def launch_replicas(
    function: Callable[..., Any], processes: int, *args: Any, num_replicas: int | None = None, **settings: Any
) -> list[Any]:
    """Calls ``function(rank, *args)`` in processes that are replicas; ``settings`` as of :func:`launch`.

    Training begins with ``num_replicas``, None: with all of them.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=TIMEOUT_S * 1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=SILENCE_S * 1000,
    )
    address = f"127.0.0.1:{server.address().rpartition(':')[2]}"
    try:
        return launch(_run, processes, function, address, num_replicas or processes, args, init=False, **settings)
    finally:
        server.shutdown()
