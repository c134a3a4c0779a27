"""Starts the replicas of this machine, shows what they write, and starts those again that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from lightning_pipesync.core.jobs import Lines
from lightning_pipesync.launch import guard

#: Maximum seconds until a replica is started again.
_LONGEST_PAUSE_S = 60.0


class Launcher:
    """Runs replicas until all are done.

    SIGTERM, SIGINT or SIGHUP makes all of them leave: each gets SIGTERM, and is killed after ``grace_s``, or at a
    second signal.

    Args:
        max_restarts: how often each replica is started again.
        backoff_s: seconds before its first restart; twice as many before each further one, up to a minute.
        grace_s: seconds that the replicas have to leave.
        log_dir: the folder to which the output of each replica is added, too.
        has_all: whether there are no replicas elsewhere.
    """

    def __init__(
        self, max_restarts: int, backoff_s: float, grace_s: float, log_dir: Path | None, has_all: bool
    ) -> None:
        self.max_restarts, self.backoff_s, self._grace_s, self._log_dir = max_restarts, backoff_s, grace_s, log_dir
        self._has_all = has_all
        self._replicas: list[Replica] = []
        self._failed: list[Replica] = []
        self._signal: int | None = None
        self._files = ExitStack()

    def add(self, number: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Adds a replica, which has a number, a command and all variables of its environment.

        Raises:
            ValueError: its log cannot be written.
        """
        log = None
        if self._log_dir is not None:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                log = self._files.enter_context((self._log_dir / f"replica-{number}.log").open("a", errors="replace"))
            except OSError as error:
                raise ValueError(f"--log_dir {self._log_dir}: {error}.") from error
        self._replicas.append(Replica(self, f"replica {number}", words, environment, log))

    def run(self) -> int:
        """Returns the exit status: that of the replica that failed first, 128 + n after signal n, else 0."""
        with self._files:
            asyncio.run(self._run())
        if self._signal is not None:
            return 128 + self._signal
        if not self._failed:
            return 0
        say(self._failed[0].failure)
        return self._failed[0].status

    def leaves_alone(self, one: Replica) -> bool:
        """Returns whether all other replicas have ended with 0, so that this one would train alone."""
        return self._has_all and all(replica.is_done for replica in self._replicas if replica is not one)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
                loop.add_signal_handler(number, self._stop, number)
        await asyncio.gather(*(self._run_replica(replica) for replica in self._replicas))

    async def _run_replica(self, replica: Replica) -> None:
        await replica.run()
        if replica.status:
            self._failed.append(replica)

    def _stop(self, number: int) -> None:
        if self._signal is not None:
            return self._kill()
        self._signal = number
        for replica in self._replicas:
            replica.stop()
        asyncio.get_running_loop().call_later(self._grace_s, self._kill)

    def _kill(self) -> None:
        for replica in self._replicas:
            replica.kill()


class Replica:
    """A command under a guard, which runs until it ends with 0, has failed too often, or is stopped.

    Attributes:
        status: its last exit status, 128 + n for signal n.
        is_done: whether that was 0.
    """

    def __init__(
        self, launcher: Launcher, name: str, words: Sequence[str], environment: Mapping[str, str], log: TextIO | None
    ) -> None:
        self.status, self.is_done = 0, False
        self._launcher, self._name, self._log = launcher, name, log
        self._words, self._environment = list(words), dict(environment)
        self._failures, self._last_error_line = 0, ""
        self._guard: Process | None = None
        self._stopped, self._killed = asyncio.Event(), False

    async def run(self) -> None:
        """Returns when the replica has ended and is not started again."""
        launcher = self._launcher
        while not self._stopped.is_set():
            await self._run_once()
            if self.is_done or self._stopped.is_set():
                return
            self._failures += 1
            happened = f"{self._name} {what_happened(self.status)}"
            if self._failures > launcher.max_restarts:
                return say(f"{happened}, and is not started again.", self._log)
            pause_s = min(launcher.backoff_s * 2 ** (self._failures - 1), _LONGEST_PAUSE_S)
            restart = f"restart {self._failures} of {launcher.max_restarts}"
            if not launcher.leaves_alone(self):
                say(f"{happened}; it starts again in {pause_s:g} s ({restart}).", self._log)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), pause_s)
            if launcher.leaves_alone(self):
                return say(f"{happened}, and is not started again: all others are done.", self._log)

    @property
    def failure(self) -> str:
        """How often it failed, and why the last time, in the user's words."""
        times = "once" if self._failures == 1 else f"{self._failures} times"
        last = f": {self._last_error_line}" if self._last_error_line else "."
        return f"{self._name} failed {times}; the last time it {what_happened(self.status)}{last}"

    def stop(self) -> None:
        """Sends SIGTERM to the command, which is not started again."""
        self._stopped.set()
        if self._guard is not None:
            with suppress(ProcessLookupError):
                self._guard.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the command and all that it has started."""
        self._stopped.set()
        self._killed = True
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    async def _run_once(self) -> None:
        """Runs the command until nothing of it is left."""
        self._last_error_line = ""
        self._guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(guard.__file__)), *self._words),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C interrupts the launcher only.
        )
        if self._stopped.is_set():  # meanwhile
            self.stop()
        if self._killed:
            self.kill()
        assert self._guard.stdout is not None
        assert self._guard.stderr is not None
        await asyncio.gather(self._show(self._guard.stdout, False), self._show(self._guard.stderr, True))
        status, self._guard = await self._guard.wait(), None
        self.status = status if status >= 0 else 128 - status
        self.is_done = self.status == 0

    async def _show(self, stream: asyncio.StreamReader, is_error: bool) -> None:
        """Writes what the command writes to the same output of this process, and to its log, line by line."""
        lines = Lines()
        while data := await stream.read(2**16):
            self._show_lines(lines.add(data), is_error)
        self._show_lines(lines.end(), is_error)

    def _show_lines(self, lines: Sequence[str], is_error: bool) -> None:
        for line in lines:
            if is_error and any(map(str.isalnum, line)):  # torchrun's report ends with a line of =
                self._last_error_line = line.strip()
            _write(sys.stderr if is_error else sys.stdout, f"[{self._name}] {line}")
            if self._log is not None:
                _write(self._log, line)


def what_happened(status: int) -> str:
    """Returns what an exit status says, in the user's words."""
    try:
        return f"was killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"ended with exit status {status}"


def say(what: str, log: TextIO | None = None) -> None:
    """Tells whoever has started the replicas, and a replica's log."""
    for file in filter(None, (sys.stderr, log)):
        _write(file, f"pipesync launch: {what}")


def _write(file: TextIO, line: str) -> None:
    try:
        print(line, file=file, flush=True)
    except BrokenPipeError:  # Whoever read it is gone, which is no reason to end a training.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
