"""The output of hosts, line by line, with the host's number."""

from __future__ import annotations

import sys
from collections.abc import Callable

#: A function of the number of a host and a line of its output, without the line end.
Output = Callable[[int, str], object]
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


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


def prefixed(num_hosts: int) -> Output:
    """Returns an output that prints ``[2] line``; in the host's color if it goes to a terminal."""
    width = len(str(num_hosts - 1))
    if not sys.stdout.isatty():
        return lambda host, line: print(f"[{host:>{width}}] {line}", flush=True)
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def show(host: int, line: str) -> None:
        prefix = f"[{host:>{width}}] ", _COLOURS[host % len(_COLOURS)]
        console.print(Text.assemble(prefix, Text.from_ansi(line)), soft_wrap=True)

    return show


def _decode(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
