"""The processes of jobs: addresses of their hosts, the environment that they start with, and lines of their output."""

from __future__ import annotations

import os
import socket


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of ``host:port``, where an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """Returns the address at which others reach this host: that of its interface towards ``host``."""
    found, kind, _, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(found, kind) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own


def shared_environment(num_processes: int) -> dict[str, str]:
    """Returns this process's environment, with defaults for processes that share a machine and print into a pipe."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **os.environ}


class Lines:
    """Splits a stream of bytes into lines. Keeps the last state of an overwritten line, such as a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[str]:
        """Returns the lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_decode(line) for line in lines]

    def end(self) -> list[str]:
        """Returns the last line if it has no line end, else nothing."""
        rest, self._rest = self._rest, b""
        return [_decode(rest)] if rest else []


def _decode(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
