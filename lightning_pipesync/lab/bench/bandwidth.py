"""The bandwidth of the network, measured by plain TCP."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench import job_sockets
from lightning_pipesync.lab.bench.job_sockets import JobSockets

#: A transfer has from so many to so many bytes, and takes about so many seconds.
LEAST_BYTES, MOST_BYTES, TRANSFER_S = MIB // 4, 8 * MIB, 0.3


def measure_bandwidth(num_bytes: int | None = None, rounds: int = 5, connections: int = 1, stride: int = 1) -> float:
    """Returns the bytes per second that a rank can send while it receives as many; a collective call.

    Each rank sends ``num_bytes`` to the rank ``stride`` behind it, all at the same time, and receives as many, over
    ``connections`` TCP connections; None: as many as take about :data:`TRANSFER_S`. The fastest of ``rounds`` transfers
    on the slowest rank counts: after sending too much on a slow link, TCP takes a while to recover.
    """
    if num_bytes is None:
        first = measure_bandwidth(LEAST_BYTES, 3, connections, stride)
        num_bytes = int(min(MOST_BYTES, max(LEAST_BYTES, TRANSFER_S * first)))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + stride) % world_size, (rank - stride) % world_size
    try:
        seconds = _time_transfers(following, num_bytes, rounds, connections)
    except TimeoutError as error:
        raise RuntimeError(
            f"Rank {rank} timed out waiting for rank {previous} or {following} ({job_sockets.TIMEOUT_S:g} s), while it "
            "measured the bandwidth."
        ) from error
    fastest: list[float] = [0.0] * world_size
    dist.all_gather_object(fastest, min(seconds[1:]))
    return num_bytes / max(fastest)


def _time_transfers(following: int, num_bytes: int, rounds: int, connections: int) -> list[float]:
    """Returns the seconds of each transfer to the rank ``following``, while as much comes from the previous one."""
    with JobSockets(backlog=connections) as ranks, ExitStack() as sockets:
        outgoing = [sockets.enter_context(ranks.connect(following)) for _ in range(connections)]
        incoming = [sockets.enter_context(ranks.accept()) for _ in range(connections)]
        payload, buffers = bytes(num_bytes // connections), [bytearray(num_bytes // connections) for _ in incoming]
        pool = sockets.enter_context(ThreadPoolExecutor(2 * connections))
        seconds = []
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            transfers = [pool.submit(connection.sendall, payload) for connection in outgoing]
            transfers += [pool.submit(_receive, *to) for to in zip(incoming, buffers, strict=True)]
            for transfer in transfers:
                transfer.result()
            seconds.append(time.perf_counter() - start)
    return seconds


def _receive(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise RuntimeError("A rank has closed its connection while the bandwidth was measured.")
        view = view[received:]
