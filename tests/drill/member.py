"""The processes of a drill: ranks, and the launcher that may have started them."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch.distributed as dist

from lightning_pipesync.lab.netlab.processes import NAMESPACES
from tests.conformance.training import Checkpoint
from tests.drill import system
from tests.drill.become import fork
from tests.drill.case import Strike
from tests.drill.phases import Gate
from tests.drill.subject import Subject

#: Characters of a rank's output that are kept.
KEPT_OUTPUT = 20_000


class Member:
    """A process of a drill, as its supervisor sees it.

    Attributes:
        pid: of the process; 0 before it has started.
        result: what the training has returned; None if it has raised or died.
        error: type and message of what it has raised.
        ended_at: when it has ended, by this process's clock.
        code: its exit status; negative for a signal.
        again: whether it takes the place of one that has ended.
    """

    def __init__(self, rank: int, again: bool = False) -> None:
        self.rank, self.again, self.pid, self.sentinel = rank, again, 0, -1
        self.connection, self.for_child = Pipe()
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.reads, False)
        self.result: dict[str, Any] | None = None
        self.error: tuple[str, str] | None = None
        self.ended_at: float | None = None
        self.code: int | None = None
        self.output = ""

    def begin(self, pid: int) -> None:
        self.pid, self.sentinel = pid, os.pidfd_open(pid)
        self.for_child.close()
        os.close(self.writes)

    def read_output(self) -> None:
        """Reads what the process has printed."""
        with suppress(BlockingIOError):
            while data := os.read(self.reads, 2**16):
                self.output = (self.output + data.decode(errors="replace"))[-KEPT_OUTPUT:]

    def listen(self) -> Iterator[dict[str, Any]]:
        """Yields what the process has said."""
        with suppress(EOFError, OSError):
            while self.connection.poll():
                yield self.connection.recv()

    def end(self) -> None:
        self.ended_at = time.monotonic()
        self.read_output()

    def close(self) -> None:
        self.connection.close()
        os.close(self.reads)
        os.close(self.sentinel)


def run_rank(
    subject: Subject,
    member: Member,
    strikes: Sequence[Strike],
    environment: dict[str, str],
    namespace: str | None,
    resumed: Checkpoint | None,
    orphaned: bool,
) -> None:
    """What a rank does; ``orphaned``: it outlives the process that has forked it."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not orphaned:
        system.die_with_parent()
    if namespace is not None:
        system.enter_network(NAMESPACES / namespace)
    os.dup2(member.writes, 1)
    os.dup2(member.writes, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(environment)
    connection = member.for_child
    gate = Gate(member.rank, strikes, connection)
    try:
        result = subject.run(member.rank, gate, resumed)
    except BaseException as error:
        gate.say(error=(type(error).__name__, str(error)))
        raise
    gate.say(result=result)


def run_launcher(ranks: Sequence[Callable[[], object]], port: int, connection: Connection) -> None:
    """Starts ranks, and runs the store of their job, as torchrun's agent does."""
    system.die_with_parent()
    connection.send([fork(rank) for rank in ranks])
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    while store:
        signal.pause()
