"""A job: a command that a guard runs, with its output as lines."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_pipesync.core.jobs import Lines
from lightning_pipesync.launch import guard

#: A function of a line without its end, and of whether it was written to standard error.
Output = Callable[[str, bool], object]


class Job:
    """A command that may be run again after it has ended, unless it was terminated or killed.

    Args:
        words: the program and its arguments.
        environment: all of its variables.
        output: called for each line that it writes.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], output: Output) -> None:
        self.last_error_line = ""
        self._words, self._environment, self._output = list(words), dict(environment), output
        self._guard: Process | None = None
        self._terminated = self._killed = False

    async def run(self) -> int:
        """Runs the command until nothing of it is left. Returns its exit status, 128 + n for signal n."""
        self.last_error_line = ""
        self._guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(guard.__file__)), *self._words),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C interrupts the launcher only.
        )
        if self._terminated:  # meanwhile
            self.terminate()
        if self._killed:
            self.kill()
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        await asyncio.gather(self._show(self._guard.stdout, False), self._show(self._guard.stderr, True))
        status, self._guard = await self._guard.wait(), None
        return status if status >= 0 else 128 - status

    def terminate(self) -> None:
        """Sends SIGTERM to the command."""
        self._terminated = True
        if self._guard is not None:
            with suppress(ProcessLookupError):
                self._guard.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the command and all that it has started."""
        self._killed = True
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    async def _show(self, stream: asyncio.StreamReader, is_error: bool) -> None:
        lines = Lines()
        while data := await stream.read(2**16):
            self._say(lines.add(data), is_error)
        self._say(lines.end(), is_error)

    def _say(self, lines: Sequence[str], is_error: bool) -> None:
        for line in lines:
            if is_error and any(map(str.isalnum, line)):  # torchrun's report ends with a line of =
                self.last_error_line = line.strip()
            self._output(line, is_error)
