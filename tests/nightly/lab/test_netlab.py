"""``pipesync netlab``: what hosts get, what befalls them, and that nothing is left of them, whatever ends the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.lab.netlab import TIMED_OUT, Freeze, Kill, Network, Slow, processes, run_job
from lightning_pipesync.lab.netlab.kernel import burst_bytes
from lightning_pipesync.lab.netlab.processes import processes_in
from tests.drill.links import Links
from tests.quick.lab.test_netlab import (
    Record,
    namespaces_of,
    needs_machine,
    nothing_left,
    python,
    rate_in_kernel,
    shell,
    wait_until,
)
from tests.support.harness import _CONTEXT as PROCESSES
from tests.support.harness import default_signals

__all__ = ["nothing_left"]  # a fixture

#: Host 0 exchanges a MiB with each other host, one after the other, and prints [Mbit/s in, Mbit/s out] of each.
TRANSFER = """
import json, os, socket, time
rank, peers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
address, size = os.environ["MASTER_ADDR"], 2**20

def receive(connection, left):
    while left:
        left -= len(connection.recv(min(left, 2**18)))

def exchange(connection):
    start = time.perf_counter()
    connection.sendall(b"!")
    receive(connection, size)
    middle = time.perf_counter()
    connection.sendall(bytes(size))
    receive(connection, 1)
    return [size * 8e-6 / (middle - start), size * 8e-6 / (time.perf_counter() - middle)]

if rank:
    while True:
        try:
            connection = socket.create_connection((address, 29500))
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes([rank]))
    receive(connection, 1)
    connection.sendall(bytes(size))
    receive(connection, size)
    connection.sendall(b"!")
else:
    server = socket.create_server(("", 29500))
    connections = [server.accept()[0] for _ in range(peers)]
    connections = {connection.recv(1)[0]: connection for connection in connections}
    print(json.dumps([exchange(connections[peer]) for peer in range(1, peers + 1)]))
"""
#: Sends 100 packets at once to an address that need not answer.
SEND_PACKETS = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(100):
    sender.sendto(bytes(1000), (sys.argv[1], 9))
"""


def transfer_rates(network: Network) -> list[list[float]]:
    record = Record()
    assert run_job(network, python(TRANSFER), output=record, timeout_s=200) == 0, record.lines
    rates: list[list[float]] = json.loads(record.of(0)[0])
    return rates


def at_most(mbit: float) -> float:
    """The fastest transfer of a MiB, of which a burst waits for nothing; how busy the machine is does not matter."""
    return mbit / (1 - burst_bytes(int(mbit * 1e6)) / 2**20)


@needs_machine
def test_no_transfer_is_faster_than_its_slowest_link(nothing_left: None) -> None:
    with Network(4, rate="100mbit", racks=2, uplink="20mbit", host_rates={1: "10mbit"}) as network:
        slow, *others = transfer_rates(network)
    assert max(slow) <= at_most(10), slow
    assert all(rate <= at_most(20) for host in others for rate in host), others


# --- the job


@needs_machine
def test_environment_and_placeholders(nothing_left: None) -> None:
    record = Record()
    script = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    words = ["{rank}/{world_size}", "{address}", "--to={master_addr}:{master_port}", '{"a": {b}}', "$HOME *"]
    with Network(2) as network, Network(2) as other:  # two at once
        assert run_job(network, python(script, *words), {"MINE": "x"}, record) == 0
        assert run_job(other, ["no-such-program"], output=record) == 127
        assert len(namespaces_of(os.getpid())) == 6
    assert (1, "pipesync netlab: cannot run no-such-program: No such file or directory.") in record.lines
    for host in (0, 1):
        environment, arguments = json.loads(record.of(host)[0])
        ranks = {"RANK": f"{host}", "NODE_RANK": f"{host}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        expected = {
            **{"MASTER_ADDR": "198.18.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "1", **ranks},
            **{f"{name}_SOCKET_IFNAME": "eth0" for name in ("GLOO", "TP", "NCCL")},
            **{"MINE": "x", "PATH": os.environ["PATH"]},
        }
        assert {name: environment[name] for name in expected} == expected
        assert arguments == [f"{host}/2", f"198.18.0.{host + 1}", "--to=198.18.0.1:29500", '{"a": {b}}', "$HOME *"]


def without_root(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs ``pipesync netlab`` on two hosts as a user without root does."""
    setpriv = ["setpriv", "--bounding-set", "-sys_admin,-net_admin", "--inh-caps", "-all"]
    if subprocess.run([*setpriv, "unshare", "--user", "--map-root-user", "--net", "--mount", "true"]).returncode:
        pytest.skip("Here users without root may not create namespaces.")
    command = [*setpriv, sys.executable, "-m", "lightning_pipesync", "netlab", "--hosts", "2", *options]
    return subprocess.run(command, capture_output=True, text=True)


@needs_machine
def test_without_root_hosts_are_emulated_in_a_user_namespace(nothing_left: None) -> None:
    job = without_root("--rate", "200mbit", "--", "echo", "host {rank} at {address}")
    assert sorted(job.stdout.splitlines()) == ["[0] host 0 at 198.18.0.1", "[1] host 1 at 198.18.0.2"]
    assert (job.returncode, job.stderr) == (0, "")


@needs_machine
def test_what_runs_is_ended_with_the_job_and_by_an_exception(nothing_left: None) -> None:
    def fail(host: int, line: str) -> None:
        raise ZeroDivisionError

    with Network(1) as network:
        assert run_job(network, shell("setsid sleep 1000 & trap '' TERM; (sleep 1000) & exit 0")) == 0
        assert not processes_in(network.namespace(0))
        with pytest.raises(ZeroDivisionError):
            run_job(network, shell("echo x; sleep 1000"), output=fail)
        assert not processes_in(network.namespace(0))


# --- what befalls hosts


@needs_machine
def test_a_killed_host_leaves_the_others_alone_and_a_timeout_ends_them(nothing_left: None, tmp_path: Path) -> None:
    record = Record()

    def output(host: int, line: str) -> None:
        record(host, line)
        if "is killed" in line:
            (tmp_path / "killed").touch()

    waits = shell(f"until [ -e '{tmp_path}/killed' ]; do sleep 0.05; done; sleep 0.5; echo end")
    with Network(2) as network:
        status = run_job(network, waits, output=output, faults=[Kill(1, 0.5)], timeout_s=200)
        assert run_job(network, ["sleep", "1000"], timeout_s=0.5) == TIMED_OUT
    assert status == 128 + signal.SIGKILL
    assert "end" in record.of(0)
    assert record.of(1) == ["pipesync netlab: host 1 is killed.", "pipesync netlab: host 1 ended with exit status 137."]


@needs_machine
def test_a_frozen_host_stands_still_and_a_job_of_which_only_such_are_left_ends(
    nothing_left: None, tmp_path: Path
) -> None:
    """What each host has written to its file tells how far it is; its last lines may still be in a pipe."""
    record, sizes = Record(), list[list[int]]()

    def output(host: int, line: str) -> None:
        record(host, line)
        if sizes or line == "pipesync netlab: host 1 is frozen.":
            sizes.append([path.stat().st_size for path in files])
            if sizes[-1][0] > sizes[0][0] + 20:
                (tmp_path / "end").touch()

    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        file.touch()
    tick = shell(f"until [ -e '{tmp_path}/end' ]; do echo x | tee -a '{tmp_path}'/$RANK; sleep 0.05; done")
    with Network(2) as network:
        faults = [Freeze(1, 0.001), Kill(0, 1000)]  # before its process has entered the host
        assert run_job(network, tick, output=output, faults=faults, timeout_s=200) == 128 + signal.SIGKILL
    assert (0, "x") in record.lines
    assert sizes[-1][1] <= sizes[0][1] + 2, "a line that it was about to write"


@needs_machine
def test_a_slow_host_is_stopped_for_the_rest_of_its_share(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For three quarters of each 50 ms, and no other host is."""
    sent: list[tuple[int, list[int], float]] = []
    send = processes.send

    def recorded(number: int, members: list[int]) -> None:
        sent.append((number, members, time.monotonic()))
        send(number, members)
        if [one for one, *_ in sent].count(signal.SIGCONT) == 10:
            (tmp_path / "end").touch()

    monkeypatch.setattr(processes, "send", recorded)
    record = Record()
    with Network(2) as network:
        until = shell(f"echo $$; until [ -e '{tmp_path}/end' ]; do sleep 0.01; done")
        assert run_job(network, until, output=record, faults=[Slow(1, 0.25)], timeout_s=200) == 0
    cycles = sent[:20]
    assert [number for number, *_ in cycles] == [signal.SIGSTOP, signal.SIGCONT] * 10
    stopped = {member for _, members, _ in cycles for member in members}
    assert int(record.of(1)[0]) in stopped
    assert int(record.of(0)[0]) not in stopped
    pauses = [on[2] - off[2] for off, on in zip(cycles[::2], cycles[1::2], strict=True)]
    assert min(pauses) >= 0.75 * 0.05 - 1e-3, "a busy machine makes them longer"


@needs_machine
def test_links_are_cut_and_mended_and_lose_packets(nothing_left: None) -> None:
    with Network(hosts=2, racks=2) as network:
        links = Links(network)
        assert links.is_connected(0)
        links.cut(0)
        assert not links.is_connected(0)
        assert links.is_connected(1)
        links.mend(0)
        wait_until(lambda: links.is_connected(0))
        for lossy in (False, True):
            if lossy:
                links.lose_packets(0)
            others = links.packets_lost(1)
            assert run_job(network, python(SEND_PACKETS, network.address(1))) == 0
            assert (links.packets_lost(0) > 0) == lossy
            assert links.packets_lost(1) == others
        links.lose_no_packets(0)
        assert rate_in_kernel(network.namespace(0), "eth0") == 10**9
        before = links.packets_lost(0)
        assert run_job(network, python(SEND_PACKETS, network.address(1))) == 0
        assert links.packets_lost(0) == before
        assert not links.is_parted()
        links.part()
        assert links.is_parted()


# --- a run that is ended itself


def start_run(*options: str, ignored: signal.Signals | None = None) -> tuple[Any, list[int]]:
    """Starts two hosts, each with a daemon, in a process of its own. Returns it and all processes of the hosts."""
    script = "setsid sleep 1000 & sleep 1000; true"
    run = PROCESSES.Process(target=_run, args=(["netlab", "--hosts", "2", *options, "--", *shell(script)], ignored))
    run.start()

    def hosts() -> list[int]:
        return processes_in(*namespaces_of(run.pid))

    wait_until(lambda: len([name for name in map(name_of, hosts()) if name == "sleep"]) == 4)
    return run, hosts()


def _run(arguments: list[str], ignored: signal.Signals | None) -> None:
    default_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python does where it is not ignored
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(main(arguments))


def name_of(process: int) -> str:
    """The program that a process runs; nothing if it has ended, also if nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().partition("\0")[0]
    except OSError:
        return ""


def alive(hosts: list[int]) -> list[int]:
    return [process for process in hosts if name_of(process) in ("sh", "sleep")]


@needs_machine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_everything(number: signal.Signals) -> None:
    run, hosts = start_run()
    os.kill(run.pid, number)
    run.join(120)
    assert run.exitcode == 128 + number
    assert not namespaces_of(run.pid)
    assert not alive(hosts)


@needs_machine
def test_the_next_run_removes_what_a_killed_one_left_and_leaves_a_living_one_alone() -> None:
    """Whose hangup nohup has it ignore."""
    living, others = start_run(ignored=signal.SIGHUP)
    os.kill(living.pid, signal.SIGHUP)
    run, hosts = start_run()
    run.kill()
    run.join(120)
    # The commands die with it, what they had started does not.
    wait_until(lambda: [name_of(process) for process in alive(hosts)].count("sh") == 0)
    assert len(namespaces_of(run.pid)) == 3
    try:
        with Network(1):
            assert not namespaces_of(run.pid)
            assert not alive(hosts)
            assert len(namespaces_of(living.pid)) == 3
            assert sorted(alive(others)) == sorted(others)
            assert living.exitcode is None
    finally:
        living.terminate()
        living.join(120)
    assert living.exitcode == 128 + signal.SIGTERM
