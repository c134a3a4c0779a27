"""TCP connections between the ranks of a job, which nobody else can open."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from types import TracebackType

import torch.distributed as dist

from lightning_pipesync.core.addresses import own_address

#: Seconds that a rank waits for another before it counts as lost.
TIMEOUT_S = 120.0

#: Bytes of a token, and the seconds in which who has connected has to send it.
TOKEN_BYTES, TOKEN_S = 32, 5.0


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
