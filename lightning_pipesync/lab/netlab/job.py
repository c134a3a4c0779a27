"""A job: one command on every host of a network."""

from __future__ import annotations

import heapq
import itertools
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from lightning_pipesync.core.jobs import Lines, shared_environment
from lightning_pipesync.lab.netlab import processes
from lightning_pipesync.lab.netlab.faults import Fault, Kill, Slow, check_faults
from lightning_pipesync.lab.netlab.network import Network
from lightning_pipesync.lab.netlab.processes import deferred_signals

#: A function of the number of a host and a line of its output, without the line end.
Output = Callable[[int, str], object]
#: The exit status of a job that was ended after its timeout, the same as of ``timeout``.
TIMED_OUT = 124
_NO_FORWARDER = "The forwarder of the network's packets has ended, and with it the job: make a new network."
#: Seconds that processes get between SIGTERM and SIGKILL.
_GRACE_S = 3.0
#: The seconds of one cycle of running and stopping of a host with a slow CPU.
_DUTY_CYCLE_S = 0.05
#: Seconds until a fault tries again, whose host has no process yet.
_ENTERING_S = 0.02
#: Cyan, magenta, green, yellow, blue and red of a terminal.
_COLOURS = (36, 35, 32, 33, 34, 31)


def run_job(
    network: Network,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    output: Output | None = None,
    faults: Iterable[Fault] = (),
    timeout_s: float | None = None,
) -> int:
    """Runs a command on every host until all have ended, and ends the processes that they leave running.

    A host that fails does not end the others, so that their reaction can be observed. When only frozen hosts are left,
    they are killed. If this call raises (from the output, or by Ctrl-C), or after the timeout, all processes of the
    hosts get SIGTERM and, after 3 seconds, SIGKILL.

    Args:
        network: an entered network, with one job at a time.
        command: the program and its arguments, without a shell. ``{rank}``, ``{world_size}``, ``{address}`` (of the
            host itself), ``{master_addr}`` and ``{master_port}`` are replaced; other braces stay.
        environment: variables in addition to those of this process and of ``Network.environment``.
        output: called on this thread as ``output(host, line)`` for each line that a host prints, standard error
            included, and for each fault. None prints the lines with the host's number.
        faults: the faults to inject into the hosts.
        timeout_s: seconds after which the job is ended; None: no timeout.

    Returns:
        The worst, that is the highest, exit status of the hosts' commands, where signal n counts as 128 + n; or
        ``TIMED_OUT``.

    Raises:
        ValueError: no command, an unknown host, or a timeout that is not positive; nothing was started.
        RuntimeError: the program that forwards the packets of the network has ended.
    """
    faults = list(faults)
    check_job(network.hosts, command, faults, timeout_s)
    job = _Job(network, output or prefixed(network.hosts), faults)
    try:
        with deferred_signals():
            job.start(command, environment or {})
        timed_out = job.supervise(timeout_s)
    finally:
        with deferred_signals():
            job.end()
    return TIMED_OUT if timed_out else max(host.status for host in job.hosts)


def check_job(num_hosts: int, command: Sequence[str], faults: Iterable[Fault], timeout_s: float | None) -> None:
    """Checks the arguments of :func:`run_job`; raises its ValueError."""
    if not command:
        raise ValueError(
            "There is no command for the hosts to run: write it after two dashes, as in -- python train.py."
        )
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}.")
    check_faults(faults, num_hosts)


class _Host:
    """The process of a host and its output."""

    def __init__(self, number: int, namespace: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.number, self.namespace, self.process = number, namespace, process
        self.pipe, self.lines = process.stdout.fileno(), Lines()
        self.exit = os.pidfd_open(process.pid)
        self.running, self.frozen = True, False
        os.set_blocking(self.pipe, False)

    def close(self) -> None:
        os.close(self.exit)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def status(self) -> int:
        """The exit status, once it has ended."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code


class _Job:
    """An event loop for the output, the exits and the faults of all hosts, on one thread."""

    def __init__(self, network: Network, output: Output, faults: Sequence[Fault]) -> None:
        self.hosts: list[_Host] = []
        self._network, self._faults = network, faults
        self._output: Output | None = output
        self._ending = False
        self._events = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._forwarder: int | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if self._network.forwarder is not None:  # Without it, hosts would wait for each other for ever.
            if self._network.forwarder.poll() is not None:
                raise RuntimeError(_NO_FORWARDER)
            self._forwarder = os.pidfd_open(self._network.forwarder.pid)
            self._events.register(self._forwarder, selectors.EVENT_READ)
        addresses = [self._network.address(number) for number in range(self._network.hosts)]
        for number in range(self._network.hosts):
            namespace = self._network.namespace(number)
            variables = {**shared_environment(self._network.hosts), **self._network.environment(number), **environment}
            values = {name: variables[name.upper()] for name in ("rank", "world_size", "master_addr", "master_port")}
            words = _fill_in(command, {**values, "address": addresses[number]})
            process = subprocess.Popen(
                processes.inside(namespace, words, addresses),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # Ctrl-C interrupts this process only, which ends the hosts.
            )
            host = _Host(number, namespace, process)
            self.hosts.append(host)
            self._events.register(host.pipe, selectors.EVENT_READ, host)
            self._events.register(host.exit, selectors.EVENT_READ, host)
        for fault in self._faults:
            host = self.hosts[fault.host]
            if isinstance(fault, Slow):
                self._take_turns(host, fault.share, runs=False)
            elif isinstance(fault, Kill):
                self._after(fault.after_s, partial(self._strike, host, processes.kill, "killed"))
            else:
                self._after(fault.after_s, partial(self._strike, host, processes.freeze, "frozen"))

    def supervise(self, timeout_s: float | None) -> bool:
        """Returns whether the timeout passed before all hosts, except frozen ones, had ended."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self._is_running:
            now = time.monotonic()
            if now >= deadline:
                for host in self.hosts:
                    if host.running:
                        self._say(host, f"ended, for it still ran after {timeout_s:g} s")
                return True
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            if not self._is_running:  # only frozen hosts have been left
                break
            next_due = min(deadline, self._due[0][0] if self._due else deadline)
            self._handle_events(None if next_due == float("inf") else max(0.0, next_due - time.monotonic()))
        return False

    @property
    def _is_running(self) -> bool:
        return any(host.running and not host.frozen for host in self.hosts)

    def end(self) -> None:
        """Ends all processes of all hosts, and shows the rest of their output."""
        self._ending = True
        namespaces = [host.namespace for host in self.hosts]
        try:
            for host in self.hosts:
                members = processes.processes_in(host.namespace)
                processes.send(signal.SIGKILL if host.frozen else signal.SIGTERM, members)
                processes.send(signal.SIGCONT, members)  # A slow host may be stopped at this moment.
            deadline = time.monotonic() + _GRACE_S
            while processes.processes_in(*namespaces) and time.monotonic() < deadline:
                self._handle_events(0.02)
        finally:
            processes.kill(*namespaces)
            for host in self.hosts:
                host.process.kill()  # It may not have entered its namespace yet.
                host.process.wait()
        for host in self.hosts:
            self._read_all(host)
            self._show(host, host.lines.end())
            host.close()
        if self._forwarder is not None:
            os.close(self._forwarder)
        self._events.close()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def _handle_events(self, timeout: float | None) -> None:
        for key, _ in self._events.select(timeout):
            if key.fd == self._forwarder:
                self._events.unregister(key.fd)
                if not self._ending:
                    raise RuntimeError(_NO_FORWARDER)
                continue
            host: _Host = key.data
            if key.fd == host.pipe:
                self._read(host)
            else:
                self._events.unregister(host.exit)
                self._read_all(host)
                host.running = False
                if host.status and not self._ending:
                    self._say(host, f"ended with exit status {host.status}")

    def _read_all(self, host: _Host) -> None:
        """Shows all output that is in a host's pipe. Later output of its other processes arrives as an event."""
        while self._read(host):
            pass

    def _read(self, host: _Host) -> bool:
        """Shows some of the output in a host's pipe; returns whether there was any."""
        try:
            data = os.read(host.pipe, 2**16)
        except BlockingIOError:
            return False
        if not data and host.pipe in self._events.get_map():
            self._events.unregister(host.pipe)
        self._show(host, host.lines.add(data))
        return bool(data)

    def _show(self, host: _Host, lines: Iterable[str]) -> None:
        for line in lines:
            output, self._output = self._output, None
            if output is not None:
                output(host.number, line)
                self._output = output  # If it raises, it is not called again.

    def _say(self, host: _Host, what: str) -> None:
        self._show(host, [f"pipesync netlab: host {host.number} {what}."])

    def _take_turns(self, host: _Host, share: float, runs: bool) -> None:
        """Lets a slow host run for its share of a cycle, and stops it for the rest."""
        if host.running and not host.frozen:
            processes.send(signal.SIGCONT if runs else signal.SIGSTOP, processes.processes_in(host.namespace))
            seconds = (share if runs else 1 - share) * _DUTY_CYCLE_S
            self._after(seconds, partial(self._take_turns, host, share, not runs))

    def _strike(self, host: _Host, strike: Callable[[str], int], what: str) -> None:
        """Kills or freezes a host; again soon if its process may be about to enter its namespace."""
        if strike(host.namespace):
            host.frozen = strike is processes.freeze
            self._say(host, f"is {what}")
        elif host.running:
            self._after(_ENTERING_S, partial(self._strike, host, strike, what))
        else:
            self._say(host, f"had ended before it could be {what}")


def _fill_in(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replaces ``{name}`` in the words of a command, for each value's name."""
    names = re.compile("{(" + "|".join(values) + ")}")
    return [names.sub(lambda found: values[found[1]], word) for word in command]


def prefixed(num_hosts: int) -> Output:
    """Returns an output that prints ``[2] line``; the number in the host's color if it goes to a terminal."""
    width, has_colours = len(str(num_hosts - 1)), sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def show(host: int, line: str) -> None:
        prefix = f"[{host:>{width}}]"
        if has_colours:
            prefix, line = f"\033[{_COLOURS[host % len(_COLOURS)]}m{prefix}\033[0m", f"{line}\033[0m"
        print(prefix, line, flush=True)

    return show
