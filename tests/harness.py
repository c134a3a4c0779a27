"""Runs a function on several real Gloo processes; a hang is a failure that names the ranks' stacks."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])

#: Seconds after which ranks that have not returned count as hung: some take 120 on a slow machine that tests share.
HANGS_S = 300.0

#: What `launch` returns for a rank that was expected to die.
DIED = "died"


#: Below those that the system gives to outgoing connections, one of which might take a port before it is listened on.
_PORTS = range(12_000, 32_000)
#: The ports that this process has given.
_given: set[int] = set()


def free_port() -> int:
    """Returns a TCP port that is free now, and that nobody is given who does not ask for it.

    Nor is it given twice, by this process or by another worker of the same tests, before somebody listens on it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = _PORTS[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    draw = random.Random()  # not the one that a test has seeded, which another may have seeded alike
    while True:
        with socket.socket() as server, suppress(OSError):
            port = draw.choice(ports)
            server.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def default_signals() -> None:
    """Undoes, in a child that is about to begin, what ``nohup`` and a shell's background have its parents ignore."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def end_with_tests() -> None:
    """Has the system kill this rank, also one that is stopped, when the process that has forked it ends."""
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:  # it ends with the tests, once no rank holds this either
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    set_parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class Ranks:
    """Real processes that call functions, until they are ended, or a function raises.

    One that has returned stays: its end could reset connections that another one is still making.
    """

    def __init__(self, world_size: int, init: bool = True, group_timeout_s: float = 60, spawn: bool = False) -> None:
        context = multiprocessing.get_context("spawn") if spawn else _CONTEXT
        self._directory = tempfile.TemporaryDirectory()
        self._folder = Path(self._directory.name)
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        try:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe()
                args = (theirs, rank, self._folder, environment, init, group_timeout_s)
                process = context.Process(target=_run_rank, args=args, daemon=False)
                self._ranks.append((process, ours))
                process.start()
                theirs.close()
        except BaseException:
            self.end()
            raise

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, may_die: tuple[int, ...] = ()
    ) -> list[Any]:
        """Calls a function on all ranks, see :func:`launch`."""
        deadline = time.monotonic() + timeout_s
        for _, connection in self._ranks:
            with suppress(OSError):  # of a rank that has died
                connection.send_bytes(pickle.dumps((function, args, deadline)))
        hung = []
        for rank, (process, connection) in enumerate(self._ranks):
            if not wait([connection, process.sentinel], max(0.0, deadline - time.monotonic())):
                hung.append(rank)
        time.sleep(1.0 if hung else 0.0)  # until they have written their stacks
        problems, results = [], []
        for rank, (process, connection) in enumerate(self._ranks):
            failed, result = False, DIED
            with suppress(EOFError, ConnectionResetError):
                if connection.poll():  # or the rank has died, and workers that it forked hold the other end
                    failed, result = pickle.loads(connection.recv_bytes())
            results.append(result)
            if rank in hung:
                problems.append(f"--- rank {rank} hung:\n{(self._folder / f'{rank}.stacks').read_text()}")
            elif failed:
                problems.append(f"--- rank {rank} raised:\n{result}")
            elif result is DIED and rank not in may_die:
                process.join()
                problems.append(f"--- rank {rank} died with exit code {process.exitcode}")
        assert not problems, "\n".join(problems)
        return results

    def end(self) -> None:
        for process, connection in self._ranks:
            if process.pid is not None:
                process.kill()
                process.join()
            connection.close()
        self._directory.cleanup()


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = HANGS_S,
    init: bool = True,
    may_die: tuple[int, ...] = (),
    group_timeout_s: float = 60,
    spawn: bool = False,
) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` new processes and returns what each returned.

    Args:
        function: importable from the tests; it finds its rank in ``torch.distributed`` or in the environment.
        init: initialize the default process group; otherwise the function (or a Trainer in it) does, from the
            environment variables that ``torchrun`` would set.
        may_die: ranks that the test kills; their outcome is ``DIED``.
        group_timeout_s: timeout of the default process group.
        spawn: start the processes anew: one that is forked cannot use CUDA once its parent has asked for devices.

    Raises:
        AssertionError: a rank raised, died, or did not return in time. The message holds tracebacks and stacks.
    """
    ranks = Ranks(world_size, init, group_timeout_s, spawn)
    try:
        return ranks.call(function, args, timeout_s, may_die)
    finally:  # also after Ctrl-C
        ranks.end()


def call_on_hosts(ranks_per_host: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function`` on a rank that finds so many neighboring ranks on each host, by the names of the hosts."""
    name = f"host {dist.get_rank() // ranks_per_host}"
    with patch("lightning_pipesync.core.comm.groups.socket.gethostname", lambda: name):
        return function(*args)


#: The ranks of :func:`on_ranks` by their number.
_KEPT: dict[int, Ranks] = {}


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANGS_S) -> list[Any]:
    """As :func:`launch`, on ranks that a file of tests keeps: what one call changes in modules, the next finds."""
    if world_size not in _KEPT:
        _KEPT[world_size] = Ranks(world_size)
    try:
        return _KEPT[world_size].call(function, args, timeout_s)
    except BaseException:
        _KEPT.pop(world_size).end()
        raise


@atexit.register  # before multiprocessing waits for them
def end_kept() -> None:
    """Ends the ranks that were kept, whose threads would go on to wake up."""
    while _KEPT:
        _KEPT.popitem()[1].end()


def _run_rank(
    connection: Connection,
    rank: int,
    folder: Path,
    environment: dict[str, str],
    init: bool,
    group_timeout_s: float,
) -> None:
    default_signals()
    end_with_tests()
    stacks = (folder / f"{rank}.stacks").open("w")
    torch.set_num_threads(1)
    # Workers of a DataLoader are forked, as in a script: a fork server of each rank's own would import all again.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", OMP_NUM_THREADS="1")
    while True:
        message = connection.recv_bytes()
        try:
            function, args, deadline = pickle.loads(message)
            # By a thread: a Trainer that ends sets the handlers of all signals to what Python has set before.
            faulthandler.dump_traceback_later(max(0.01, deadline - time.monotonic()), file=stacks)
            if init and not dist.is_initialized():
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder / 'store'}",
                    rank=rank,
                    world_size=int(environment["WORLD_SIZE"]),
                    timeout=timedelta(seconds=group_timeout_s),
                )
            failed, result = False, function(*args)
        except BaseException:
            failed, result = True, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps((failed, result)))
        if failed:  # which must not wait in a destructor for peers that it has left alone
            os._exit(1)


def raised(function: Callable[[], Any]) -> tuple[str, str] | None:
    """Returns the type's name and the message of what ``function`` raises, or None."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def assert_raised(outcome: tuple[str, str] | None, kind: str, *words: str) -> None:
    """Asserts that an outcome of :func:`raised` is of a type, and that its message holds all words."""
    assert outcome is not None, words
    assert outcome[0] == kind
    for word in words:
        assert word in outcome[1]


def assert_refused(outcomes: dict[str, tuple[str, str] | None]) -> None:
    """Asserts that each outcome of :func:`raised` is a ValueError whose message holds the words that are its key."""
    for words, outcome in outcomes.items():
        assert_raised(outcome, "ValueError", words)


def kill_stopped_siblings() -> None:
    """Kills the ranks of this launch that were sent SIGSTOP."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = status.read_text().rsplit(")", 1)[1].split()[:2]
            if state == "T" and int(parent) == os.getppid():
                os.kill(int(status.parent.name), signal.SIGKILL)
