"""Connections between the ranks of a job: a stranger who finds the port is turned away."""

from __future__ import annotations

import socket
from contextlib import suppress
from unittest.mock import patch

import torch.distributed as dist

from lightning_pipesync.lab.bench import bandwidth
from lightning_pipesync.lab.bench.bandwidth import JobSockets
from tests.support.harness import on_ranks

#: What strangers send first: nothing, and then silence or the end; another token; a part of a token.
STRANGERS = (None, b"", b"x" * 32, b"x" * 3)


def meet_strangers() -> tuple[bytes, list[bytes]]:
    """Returns what arrives over the accepted connection, and what the strangers on rank 0 get to read."""
    strangers: list[socket.socket] = []
    with patch.object(bandwidth, "TOKEN_S", 1.0), JobSockets(backlog=8) as sockets:
        for words in STRANGERS if dist.get_rank() == 0 else ():
            strangers.append(socket.create_connection(sockets.addresses[0], timeout=60))
            strangers[-1].sendall(words or b"")
            if words == b"":
                strangers[-1].shutdown(socket.SHUT_WR)
        dist.barrier()  # they are there before the other rank
        with sockets.connect(0) if dist.get_rank() == 1 else sockets.accept() as connection:
            connection.sendall(f"rank {dist.get_rank()}".encode())
            return connection.recv(10), [read_end(stranger) for stranger in strangers]


def read_end(stranger: socket.socket) -> bytes:
    with stranger, suppress(ConnectionResetError):
        return stranger.recv(1)
    return b""


def test_strangers_are_turned_away() -> None:
    assert on_ranks(meet_strangers, 2) == [(b"rank 1", [b""] * len(STRANGERS)), (b"rank 0", [])]
