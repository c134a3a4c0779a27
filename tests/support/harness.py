"""Runs a function on several real Gloo processes; a hang is a failure that names the ranks' stacks."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
_CONTEXT.set_forkserver_preload(["tests.support.preload"])

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


#: Ranks that run at once on this machine, whatever a file of tests asks for, and however many workers there are.
NUM_SLOTS = 8


@contextmanager
def slots(number: int) -> Iterator[None]:
    """Waits until so many processes may run beside those of all other workers, eight at most; not to be nested."""
    number = min(number, NUM_SLOTS)
    folder = Path(tempfile.gettempdir()) / f"pipesync-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with ExitStack() as taken:
        with (folder / "queue").open("w") as queue:  # whoever takes slots takes all that it needs
            fcntl.flock(queue, fcntl.LOCK_EX)
            free = list(range(NUM_SLOTS))
            while len(free) > NUM_SLOTS - number:
                slot = (folder / str(free[0])).open("w")
                try:
                    fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    taken.enter_context(slot)
                    free.pop(0)
                except BlockingIOError:
                    slot.close()
                    free.append(free.pop(0))
                    time.sleep(0.005)
        yield


class LeftBehindError(AssertionError):
    """A call, which has returned ``results`` by rank, has left something to the next one."""

    def __init__(self, left: list[Any], results: list[Any]) -> None:
        super().__init__(f"left behind, by rank: {left}")
        self.results = results


class Ranks:
    """Real processes that call functions, until they are ended, or a function raises.

    One that has returned stays: its end could reset connections that another one is still making.
    """

    def __init__(self, spawn: bool = False) -> None:
        self._context = multiprocessing.get_context("spawn") if spawn else _CONTEXT
        self._directory = tempfile.TemporaryDirectory()
        self._folder = Path(self._directory.name)
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._calls = 0

    def call(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        timeout_s: float,
        *,
        init: bool = True,
        may_die: tuple[int, ...] = (),
        group_timeout_s: float = 60,
        mostly_wait: bool = False,
    ) -> list[Any]:
        """Calls a function on as many ranks, see :func:`launch`; starts those that there are not."""
        for rank in range(len(self._ranks), world_size):
            ours, theirs = multiprocessing.Pipe()
            process = self._context.Process(target=_run_rank, args=(theirs, rank, self._folder), daemon=False)
            self._ranks.append((process, ours))
            process.start()
            theirs.close()
        self._calls += 1
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        store = self._folder / f"store {self._calls}" if init else None
        with slots(1 if mostly_wait else world_size):
            deadline = time.monotonic() + timeout_s
            message = (function, args, deadline, address, store, group_timeout_s)
            return self._ask(message, world_size, deadline, may_die)

    def clear(self, world_size: int) -> list[Any]:
        """Ends the process group of the last call; returns what each rank has left to the next one."""
        return self._ask(None, world_size, time.monotonic() + HANGS_S)

    def _ask(self, message: Any, world_size: int, deadline: float, may_die: tuple[int, ...] = ()) -> list[Any]:
        """Sends a message to each rank; returns what they answer."""
        ranks = self._ranks[:world_size]
        for _, connection in ranks:
            with suppress(OSError):  # of a rank that has died
                connection.send_bytes(pickle.dumps(message))
        hung = []
        for rank, (process, connection) in enumerate(ranks):
            if not wait([connection, process.sentinel], max(0.0, deadline - time.monotonic())):
                hung.append(rank)
        time.sleep(1.0 if hung else 0.0)  # until they have written their stacks
        problems, results = [], []
        for rank, (process, connection) in enumerate(ranks):
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
    mostly_wait: bool = False,
) -> list[Any]:
    """Calls ``function(*args)`` on ``world_size`` new processes and returns what each returned.

    Args:
        function: importable from the tests; it finds its rank in ``torch.distributed`` or in the environment.
        init: initialize the default process group; otherwise the function (or a Trainer in it) does, from the
            environment variables that ``torchrun`` would set.
        may_die: ranks that the test kills; their outcome is ``DIED``.
        group_timeout_s: timeout of the default process group.
        spawn: start the processes anew: one that is forked cannot use CUDA once its parent has asked for devices.
        mostly_wait: they compute so little that all together count as one rank among those of other workers.

    Raises:
        AssertionError: a rank raised, died, or did not return in time. The message holds tracebacks and stacks.
    """
    ranks = Ranks(spawn)
    try:
        how = {"init": init, "may_die": may_die, "group_timeout_s": group_timeout_s, "mostly_wait": mostly_wait}
        return ranks.call(function, world_size, args, timeout_s, **how)
    finally:  # also after Ctrl-C
        ranks.end()


def call_on_hosts(ranks_per_host: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function`` on a rank that finds so many neighboring ranks on each host, by the names of the hosts."""
    name = f"host {dist.get_rank() // ranks_per_host}"
    with patch("lightning_pipesync.core.comm.groups.socket.gethostname", lambda: name):
        return function(*args)


#: The ranks of :func:`on_ranks`, for all tests; None: there are none.
_kept: Ranks | None = None


def on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANGS_S, init: bool = True
) -> list[Any]:
    """As :func:`launch`, on ranks that live as long as the tests, each time with a new process group.

    Raises:
        AssertionError: also if the function leaves a thread or a changed module to the next one.
    """
    global _kept
    if _kept is None:
        _kept = Ranks()
    try:
        results = _kept.call(function, world_size, args, timeout_s, init=init)
        left = _kept.clear(world_size)
        if any(left):
            raise LeftBehindError(left, results)
        return results
    except BaseException:
        end_kept()
        raise


@atexit.register  # before multiprocessing waits for them
def end_kept() -> None:
    """Ends the ranks that were kept, whose threads would go on to wake up."""
    global _kept
    if _kept is not None:
        _kept.end()
    _kept = None


def _run_rank(connection: Connection, rank: int, folder: Path) -> None:
    default_signals()
    end_with_tests()
    stacks = (folder / f"{rank}.stacks").open("w")
    torch.set_num_threads(1)
    # Workers of a DataLoader are forked, as in a script: a fork server of each rank's own would import all again.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", OMP_NUM_THREADS="1")
    before = State()
    while True:
        message = pickle.loads(connection.recv_bytes())
        try:
            if message is None:
                failed, result = False, before.restore()
            else:
                function, args, deadline, address, store, group_timeout_s = message
                # By a thread: a Trainer that ends sets the handlers of all signals to what Python has set before.
                faulthandler.dump_traceback_later(max(0.01, deadline - time.monotonic()), file=stacks)
                before = State()
                os.environ.update(address)
                if store is not None:
                    dist.init_process_group(
                        "gloo",
                        init_method=f"file://{store}",
                        rank=rank,
                        world_size=int(address["WORLD_SIZE"]),
                        timeout=timedelta(seconds=group_timeout_s),
                    )
                failed, result = False, function(*args)
        except BaseException:
            failed, result = True, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps((failed, result)))
        if failed:  # which must not wait in a destructor for peers that it has left alone
            os._exit(1)


class State:
    """What a call finds in its process, and must leave so."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._threads = set(threading.enumerate())
        self._names = _names()

    def restore(self) -> list[str]:
        """Ends the process group, sets the environment back, and returns what else the call has left behind."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if (accelerate := sys.modules.get("accelerate.state")) is not None:  # or it takes the group to be there
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.GradientState._reset_state()
        os.environ.clear()
        os.environ.update(self._environment)
        deadline = time.monotonic() + 5
        kept = "tqdm_monitor"  # by design of that library
        while left := [t.name for t in threading.enumerate() if t not in self._threads and t.name != kept]:
            gc.collect()  # threads that serve an object end with it
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        now = _names()
        changed = [name for name, value in self._names.items() if now.get(name, value) is not value]
        return left + changed


def _names() -> dict[str, Any]:
    """Returns what the package's modules have, by name."""
    names = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "lightning_pipesync"]:
        names.update({f"{module.__name__}.{name}": value for name, value in vars(module).items()})
    return names


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
