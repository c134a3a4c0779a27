"""TCP connections between the ranks of a job, which nobody else can open, and the bandwidth that they reach."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType

import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.jobs import own_address

#: Seconds that a rank waits for another before it counts as lost.
TIMEOUT_S = 120.0

#: Bytes of a token, and the seconds in which who has connected has to send it.
TOKEN_BYTES, TOKEN_S = 32, 5.0

#: A transfer has from so many to so many bytes, and takes about so many seconds.
LEAST_BYTES, MOST_BYTES, TRANSFER_S = MIB // 4, 8 * MIB, 0.3


class JobSockets:
    """A socket that listens for other ranks, until the end of a ``with`` block; constructing one is a collective call.

    Each rank draws a token, which the process group sends to the others. A connection that does not begin with it is
    closed. ``addresses`` are the host and the port of each rank.
    """

    def __init__(self, backlog: int) -> None:
        self._server = socket.create_server((address_of_this_host(), 0), backlog=backlog)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        host, port = self._server.getsockname()[:2]
        gathered: list[tuple[str, int, bytes]] = [("", 0, b"")] * dist.get_world_size()
        dist.all_gather_object(gathered, (host, port, self._token))
        self.addresses = [(host, port) for host, port, _ in gathered]
        self._tokens = [token for _, _, token in gathered]

    def __enter__(self) -> JobSockets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()

    def connect(self, rank: int) -> socket.socket:
        """Returns a connection to a rank, which accepts it; OSError if the rank cannot be reached."""
        connection = socket.create_connection(self.addresses[rank], TIMEOUT_S)
        connection.sendall(self._tokens[rank])
        return connection

    def accept(self) -> socket.socket:
        """Returns the next connection of a rank of this job; TimeoutError after :data:`TIMEOUT_S`."""
        deadline = time.monotonic() + TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            self._server.settimeout(left)
            connection, _ = self._server.accept()
            if hmac.compare_digest(_received(connection, time.monotonic() + TOKEN_S), self._token):
                connection.settimeout(TIMEOUT_S)
                return connection
            connection.close()
        raise TimeoutError(f"No rank of this job has connected for {TIMEOUT_S:g} s.")


def address_of_this_host() -> str:
    """Returns the address at which other hosts reach this one: that of the interface towards ``MASTER_ADDR``."""
    return own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, socket.AF_INET)


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
            f"Rank {rank} timed out waiting for rank {previous} or {following} ({TIMEOUT_S:g} s), while it "
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
            transfers += [pool.submit(receive, *to) for to in zip(incoming, buffers, strict=True)]
            for transfer in transfers:
                transfer.result()
            seconds.append(time.perf_counter() - start)
    return seconds


def receive(connection: socket.socket, buffer: bytearray) -> None:
    """Fills the buffer; RuntimeError if the rank at the other end has closed its connection."""
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise RuntimeError("A rank has closed its connection while the bandwidth was measured.")
        view = view[received:]


def _received(connection: socket.socket, deadline: float) -> bytes:
    """Returns the first bytes of a connection, as many as a token has, or fewer if no more come until ``deadline``."""
    received = b""
    try:
        while len(received) < TOKEN_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (some := connection.recv(TOKEN_BYTES - len(received))):
                break
            received += some
    except OSError:  # it takes too long, or has reset the connection
        return received
    return received
