"""Connections between the ranks of a job: a stranger who finds the port is turned away."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from lightning_pipesync.lab.bench import job_sockets
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.job_sockets import JobSockets
from lightning_pipesync.lab.plan.links import measure_links
from tests.support.harness import on_ranks

#: What strangers send first: nothing, and then silence or the end; another token; a part of a token.
STRANGERS = (None, b"", b"x" * 32, b"x" * 3)


def meet_strangers() -> tuple[bytes, list[bytes]]:
    """Returns what arrives over the accepted connection, and what the strangers on rank 0 get to read."""
    job_sockets.TOKEN_S = 3.0
    with JobSockets(backlog=8) as sockets:
        strangers = []
        if dist.get_rank() == 0:
            for words in STRANGERS:
                stranger = socket.create_connection(sockets.addresses[0])
                stranger.settimeout(60)
                strangers.append(stranger)
                if words is not None:
                    stranger.sendall(words)
                    if not words:
                        stranger.shutdown(socket.SHUT_WR)
        dist.barrier()  # they are there before the other rank
        if dist.get_rank() == 1:
            with sockets.connect(0) as connection:
                connection.sendall(b"rank 1")
                return connection.recv(10), []
        with sockets.accept() as connection:
            arrived = connection.recv(10)
            connection.sendall(b"rank 0")
        return arrived, [read_end(stranger) for stranger in strangers]


def read_end(stranger: socket.socket) -> bytes:
    with stranger:
        try:
            return stranger.recv(1)
        except ConnectionResetError:
            return b""


def test_strangers_are_turned_away() -> None:
    (first, strangers), (second, _) = on_ranks(meet_strangers, 2)
    assert first == b"rank 1"
    assert second == b"rank 0"
    assert strangers == [b""] * len(STRANGERS)


def wait_in_vain() -> bool:
    job_sockets.TIMEOUT_S = 0.3
    with JobSockets(backlog=1) as sockets, pytest.raises(TimeoutError):
        sockets.accept()
    return True


def test_who_waits_in_vain_raises() -> None:
    assert on_ranks(wait_in_vain, 1) == [True]


def measure() -> tuple[float, float]:
    links = measure_links(1e9)
    return min(links.bandwidth[0][1], links.bandwidth[1][0]), measure_bandwidth(2**18, 2, connections=3)


def test_measurements_connect() -> None:
    (first_link, first), (second_link, second) = on_ranks(measure, 2)
    assert min(first_link, second_link) > 0
    assert first == second > 0
