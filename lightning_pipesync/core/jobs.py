"""What a program needs that starts several processes on this machine: their environment, and lines of their output."""

from __future__ import annotations

import os


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
