"""The bandwidth of the network, measured by plain TCP."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time

import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB


def measure_bandwidth(num_bytes: int = 8 * MIB, rounds: int = 5) -> float:
    """Returns the bytes per second that a rank can send while it receives as many; a collective call.

    All ranks form a ring, as in the collectives: each sends to the next and receives from the previous one.

    Args:
        num_bytes: the size of a transfer.
        rounds: the number of transfers; the median of the slowest rank counts.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with socket.create_server((own_address(), 0)) as server:
        addresses: list[tuple[str, int]] = [("", 0)] * world_size
        dist.all_gather_object(addresses, server.getsockname()[:2])
        outgoing = socket.create_connection(addresses[(rank + 1) % world_size])
        incoming, _ = server.accept()
    payload, buffer = bytes(num_bytes), bytearray(num_bytes)
    seconds = []
    with outgoing, incoming:
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            sender = threading.Thread(target=outgoing.sendall, args=(payload,))
            sender.start()
            _receive(incoming, buffer)
            sender.join()
            seconds.append(time.perf_counter() - start)
    medians: list[float] = [0.0] * world_size
    dist.all_gather_object(medians, statistics.median(seconds[1:]))
    return num_bytes / max(medians)


def own_address() -> str:
    """Returns the address at which other hosts reach this one: that of the interface towards ``MASTER_ADDR``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _receive(connection: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise RuntimeError("A rank has closed its connection while the bandwidth was measured.")
        view = view[received:]
