"""Starts the replicas of this machine, and waits for them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

from lightning_pipesync.launch.replica import Replica


class Launcher:
    """Runs replicas until all are done.

    SIGTERM, SIGINT or SIGHUP makes all of them leave: each gets SIGTERM, and is killed after ``grace_s``, or at a
    second signal.

    Args:
        max_restarts: how often each replica is started again.
        backoff_s: seconds before its first restart.
        grace_s: seconds that the replicas have to leave.
        log_dir: the folder to which the output of each replica is added, too.
        has_all: whether there are no replicas elsewhere.
    """

    def __init__(
        self, max_restarts: int, backoff_s: float, grace_s: float, log_dir: Path | None, has_all: bool
    ) -> None:
        self._max_restarts, self._backoff_s, self._grace_s, self._log_dir = max_restarts, backoff_s, grace_s, log_dir
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
        name = f"replica {number}"
        output = partial(_show, f"[{name}] ", log)
        restarts = self._max_restarts, self._backoff_s, self._is_alone
        self._replicas.append(Replica(name, words, environment, output, partial(say, log=log), *restarts))

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

    def _is_alone(self, one: Replica) -> bool:
        """Returns whether all other replicas have ended with 0, so that this one would train alone."""
        return self._has_all and all(replica.is_done for replica in self._replicas if replica is not one)

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


def _show(prefix: str, log: TextIO | None, line: str, is_error: bool) -> None:
    """Writes a line of a replica to the same output as it did, and to its log."""
    _write(sys.stderr if is_error else sys.stdout, prefix + line)
    if log is not None:
        _write(log, line)


def say(what: str, log: TextIO | None = None) -> None:
    """Tells whoever has started the replicas, and a replica's log."""
    for file in filter(None, (sys.stderr, log)):
        _write(file, f"pipesync launch: {what}")


def _write(file: TextIO, line: str) -> None:
    try:
        print(line, file=file, flush=True)
    except BrokenPipeError:  # Whoever read it is gone, which is no reason to end a training.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
