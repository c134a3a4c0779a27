"""``pipesync netlab``: hosts on a slow network, what befalls them, and that nothing is left of them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.core.jobs import Lines
from lightning_pipesync.lab.netlab import TIMED_OUT, Freeze, Kill, Network, Slow, run_job
from lightning_pipesync.lab.netlab.faults import parse_slow
from lightning_pipesync.lab.netlab.processes import NAMESPACES, processes_in
from lightning_pipesync.lab.netlab.units import parse_rate, parse_seconds, parse_share
from tests.support.harness import _CONTEXT as PROCESSES
from tests.support.harness import default_signals

#: Host 0 exchanges MIB MiB with a process of its own over loopback, then with each other host, and prints
#: [Mbit/s in, Mbit/s out] of each.
TRANSFER = """
import json, os, socket, time
rank, peers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
address, size = os.environ["MASTER_ADDR"], MIB * 2**20

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

if rank == 0:
    server = socket.create_server(("", 29500))
    loopback = os.fork()
    if not loopback:
        rank, address = -1, "127.0.0.1"
if rank != 0:
    while True:
        try:
            connection = socket.create_connection((address, 29500))
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes([rank % 256]))
    receive(connection, 1)
    connection.sendall(bytes(size))
    receive(connection, size)
    connection.sendall(b"!")
else:
    connections = [server.accept()[0] for _ in range(peers + 1)]
    connections = {connection.recv(1)[0]: connection for connection in connections}
    rates = {peer: exchange(connections[peer]) for peer in sorted(connections, reverse=True)}
    print(json.dumps([rates[255], *(rates[peer] for peer in range(1, peers + 1))]))
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print("sum", tensor[0].item())
dist.destroy_process_group()
"""


needs_machine = pytest.mark.usefixtures("machine")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Asserts that the test leaves no namespace of this process behind, and no process in one."""
    yield
    assert not namespaces_of(os.getpid())


class Record:
    """An output that keeps the lines of each host."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def __call__(self, host: int, line: str) -> None:
        self.lines.append((host, line))

    def of(self, host: int) -> list[str]:
        return [line for number, line in self.lines if number == host]


def namespaces_of(process: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"pipesync-{process}.*")]


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def wait_until(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it is not so within {timeout_s} s"
        time.sleep(0.02)


# --- what a user writes


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("200mbit", 2 * 10**8), ("100kbit", 10**5)]
)
def test_rates_are_bits_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["1 gigabit", "1gb", "gbit", "1000", "-1gbit", "", "1gbit/s", "1bit", "50kbit", "40gbit"]
)
def test_bad_rates_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_rate(text)


def test_durations_and_shares() -> None:
    assert [parse_seconds(text) for text in ("10s", "500ms", "2min", "1.5")] == [10, 0.5, 120, 1.5]
    assert parse_share("50%") == 0.5
    assert parse_slow(["3:50%", "3:200mbit"]) == ([Slow(3, 0.5)], {3: "200mbit"})
    for parse, text in [(parse_seconds, "10h"), (parse_seconds, "s"), (parse_share, "0%"), (parse_share, "100%")]:
        with pytest.raises(ValueError, match=f"'{text}' is not a"):
            parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hosts 2 --rate 1gigabit -- true", "'1gigabit' is not a rate"),
        ("--hosts 0 -- true", "hosts must be between 1 and"),
        ("--hosts 4 --racks 3 -- true", "racks must divide the 4 hosts"),
        ("--hosts 2 --racks 4 -- true", "racks must divide the 2 hosts"),
        ("--hosts 2 --racks 0 -- true", "racks must divide the 2 hosts"),
        ("--hosts 4 --uplink 100mbit -- true", "uplink is the link between racks"),
        ("--hosts 4 --racks 2 --uplink fast -- true", "'fast' is not a rate"),
        ("--hosts 2 --slow 2:50% -- true", "slow: there is no host 2"),
        ("--hosts 2 --slow 2:10mbit -- true", "there is no host 2"),
        ("--hosts 2 --slow 1:50% --slow 1:20% -- true", "slow: host 1 is named twice"),
        ("--hosts 2 --slow 1:10mbit --slow=1:20mbit -- true", "slow: the link of host 1 is named twice"),
        ("--hosts 2 --slow 1 -- true", "slow: '1' names no host"),
        ("--hosts 2 --kill 2@10s -- true", "kill: there is no host 2"),
        ("--hosts 2 --kill 1@soon -- true", "'soon' is not a duration"),
        ("--hosts 2 --kill one@1s -- true", "kill: 'one@1s' names no host"),
        ("--hosts 2 --freeze 7@1s -- true", "freeze: there is no host 7"),
        ("--hosts 2 --timeout 0s -- true", "timeout_s must be positive"),
        ("--hosts 2", "There is no command"),
        ("--hosts 2 --", "There is no command"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["netlab", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the system itself is refused")
def test_what_the_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    monkeypatch.setattr("lightning_pipesync.lab.netlab.network.missing_capabilities", lambda: ["CAP_NET_ADMIN"])
    assert "lacks CAP_NET_ADMIN" in refusal(capsys)
    monkeypatch.setitem(sys.modules, "pyroute2", None)  # type: ignore[arg-type]  # as if it was not there
    assert 'pip install "lightning-pipesync[netlab]"' in refusal(capsys)


def test_other_systems_than_linux_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "on Linux only; this is darwin" in refusal(capsys)


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["netlab", "--hosts", "2", "--", "true"]) == 2
    return capsys.readouterr().err


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
def test_a_kernel_without_the_token_bucket_is_named_and_all_is_undone(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    from lightning_pipesync.lab.netlab import kernel

    def unknown_queue(rate: int) -> int:
        raise NetlinkError(errno.ENOENT, "as the kernel answers")

    monkeypatch.setattr(kernel, "burst_bytes", unknown_queue)
    with pytest.raises(RuntimeError, match="no tbf"), Network(2):
        pass


def test_output_is_cut_into_lines() -> None:
    lines = Lines()
    assert lines.add(b"one\ntw") == ["one"]
    assert lines.add(b"o\r\n 10%\r 20%\r") == ["two"]
    assert lines.add(b" 30%\nrest") == [" 30%"]
    assert lines.end() == ["rest"]
    assert lines.end() == []


# --- the network


def transfer_rates(network: Network, mib: int) -> list[list[float]]:
    record = Record()
    script = TRANSFER.replace("MIB", str(mib))
    assert run_job(network, [sys.executable, "-I", "-S", "-c", script], output=record, timeout_s=200) == 0, record.lines
    rates: list[list[float]] = json.loads(record.of(0)[0])
    return rates


def fastest_rates(network: Network, mib: int, suffice: Callable[..., bool]) -> list[list[float]]:
    """Returns the fastest of several transfers: a busy machine can only make one slower."""
    fastest = transfer_rates(network, mib)
    for _ in range(9):
        if suffice(*fastest):
            break
        fastest = [[*map(max, *pair)] for pair in zip(fastest, transfer_rates(network, mib), strict=True)]
    return fastest


@needs_machine
def test_a_transfer_takes_what_the_rate_allows_in_both_directions(nothing_left: None) -> None:
    with Network(2, rate="100mbit") as network:
        loopback, link = fastest_rates(network, 10, lambda host, link: min(link) > 60 and min(host) > 2 * 115)
    assert all(60 < rate < 115 for rate in link), link
    assert all(rate > 2 * 115 for rate in loopback), loopback


@needs_machine
def test_the_link_between_racks_and_a_slow_hosts_link_are_slower(nothing_left: None) -> None:
    with Network(6, rate="400mbit", racks=2, uplink="80mbit", host_rates={2: "40mbit"}) as network:
        _, neighbor, slow, *others = fastest_rates(
            network, 4, lambda _, one, __, *far: min(one) > 130 and min(map(min, far)) > 45
        )
    assert min(neighbor) > 130, neighbor
    assert max(slow) < 50, slow
    assert all(45 < rate < 100 for host in others for rate in host), others


@needs_machine
def test_two_networks_at_once(nothing_left: None) -> None:
    with Network(2) as one, Network(2) as other:
        assert run_job(one, shell("true")) == run_job(other, shell("true")) == 0
        assert len(namespaces_of(os.getpid())) == 6


@needs_machine
def test_gloo_reduces_over_the_hosts(nothing_left: None) -> None:
    record = Record()
    with Network(2) as network:
        assert run_job(network, python(ALL_REDUCE), output=record, timeout_s=200) == 0
    assert [line for _, line in record.lines if "sum" in line] == ["sum 3.0"] * 2


# --- the job


@needs_machine
def test_environment_and_placeholders(nothing_left: None) -> None:
    record = Record()
    script = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    words = ["{rank}/{world_size}", "{address}", "--to={master_addr}:{master_port}", '{"a": {b}}', "$HOME *"]
    with Network(2) as network:
        assert run_job(network, [*python(script), *words], {"MINE": "x"}, record) == 0
    for host in (0, 1):
        environment, arguments = json.loads(record.of(host)[0])
        expected = {
            "MASTER_ADDR": "198.18.0.1",
            "MASTER_PORT": "29500",
            "RANK": str(host),
            "NODE_RANK": str(host),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "MINE": "x",
            "PATH": os.environ["PATH"],
        }
        assert {name: environment[name] for name in expected} == expected
        assert arguments == [f"{host}/2", f"198.18.0.{host + 1}", "--to=198.18.0.1:29500", '{"a": {b}}', "$HOME *"]


@needs_machine
def test_each_line_has_its_hosts_number_and_the_worst_status_is_returned(
    capfd: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    assert main(["netlab", "--hosts", "3", "--", *shell("echo out; echo err >&2; exit $((RANK * 2))")]) == 4
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[0] err",
        "[0] out",
        "[1] err",
        "[1] out",
        "[1] pipesync netlab: host 1 ended with exit status 2.",
        "[2] err",
        "[2] out",
        "[2] pipesync netlab: host 2 ended with exit status 4.",
    ]


@needs_machine
def test_status_of_a_signal_and_of_a_command_that_cannot_run(nothing_left: None) -> None:
    record = Record()
    with Network(2) as network:
        assert run_job(network, shell("[ $RANK = 0 ] || kill -ABRT $$"), output=record) == 128 + signal.SIGABRT
        assert run_job(network, ["no-such-program"], output=record) == 127
    assert (1, "pipesync netlab: cannot run no-such-program: No such file or directory.") in record.lines


@needs_machine
def test_what_a_command_leaves_running_is_ended_with_the_job(nothing_left: None) -> None:
    with Network(1) as network:
        assert run_job(network, shell("setsid sleep 1000 & trap '' TERM; (sleep 1000) & exit 0")) == 0
        assert not processes_in(network.namespace(0))


@needs_machine
def test_an_exception_ends_and_removes_everything(nothing_left: None) -> None:
    def fail(host: int, line: str) -> None:
        raise ZeroDivisionError

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError), Network(2) as network:
        run_job(network, shell("echo x; sleep 1000"), output=fail)
    assert time.monotonic() - begin < 1000


# --- what befalls hosts


@needs_machine
def test_a_killed_host_leaves_the_others_alone(nothing_left: None, tmp_path: Path) -> None:
    record = Record()

    def output(host: int, line: str) -> None:
        record(host, line)
        if "is killed" in line:
            (tmp_path / "killed").touch()

    with Network(2) as network:
        waits = shell(f"until [ -e '{tmp_path}/killed' ]; do sleep 0.05; done; sleep 0.5; echo end")
        status = run_job(network, waits, output=output, faults=[Kill(1, 0.5)], timeout_s=200)
    assert status == 128 + signal.SIGKILL
    assert "end" in record.of(0)
    assert "end" not in record.of(1)
    assert "pipesync netlab: host 1 is killed." in record.of(1)


@needs_machine
def test_a_frozen_host_stands_still_until_the_time_is_up(capfd: pytest.CaptureFixture[str], nothing_left: None) -> None:
    tick = shell("while true; do echo tick; sleep 0.1; done")
    assert main(["netlab", "--hosts", "2", "--freeze", "1@4s", "--timeout", "12s", "--", *tick]) == TIMED_OUT
    lines = capfd.readouterr().out.splitlines()
    assert "[1] pipesync netlab: host 1 is frozen." in lines
    frozen = lines.index("[1] pipesync netlab: host 1 is frozen.")
    # What was in the pipe when it was frozen may still come.
    assert 1 <= lines.count("[1] tick") < lines.count("[0] tick")
    assert lines[frozen:].count("[1] tick") <= 1
    assert lines[frozen:].count("[0] tick") >= 5


@needs_machine
def test_a_job_of_which_only_frozen_hosts_are_left_ends(nothing_left: None) -> None:
    record = Record()
    with Network(2) as network:
        faults = [Freeze(1, 0.001), Kill(0, 1000)]  # before its process has entered the host
        first_ends = shell('[ "$RANK" = 0 ] || sleep 1000')
        status = run_job(network, first_ends, output=record, faults=faults, timeout_s=200)
    assert status == 128 + signal.SIGKILL
    assert record.of(0) == []


@needs_machine
def test_a_slow_host_gets_its_share_of_the_cpu(nothing_left: None) -> None:
    record = Record()
    burn = """
import time
end = time.monotonic() + 2
while time.monotonic() < end: pass
print(time.process_time())
"""
    with Network(2) as network:
        assert run_job(network, python(burn), output=record, faults=[Slow(1, 0.25)]) == 0
    fast, slow = float(record.of(0)[0]), float(record.of(1)[0])
    assert 0.05 < slow / fast < 0.6


# --- a run that is ended itself


def start_run(ignored: signal.Signals | None = None) -> tuple[Any, list[int]]:
    """Starts two hosts, each with a daemon, in a process of its own. Returns it and all processes of the hosts."""
    script = "setsid sleep 1000 & sleep 1000; true"
    run = PROCESSES.Process(target=_run, args=(["netlab", "--hosts", "2", "--", *shell(script)], ignored))
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


def alive(processes: list[int]) -> list[int]:
    return [process for process in processes if name_of(process) in ("sh", "sleep")]


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
def test_a_hangup_that_nohup_ignores_ends_nothing() -> None:
    run, hosts = start_run(ignored=signal.SIGHUP)
    os.kill(run.pid, signal.SIGHUP)
    run.join(1)
    assert run.exitcode is None
    assert sorted(alive(hosts)) == sorted(hosts)
    run.terminate()
    run.join(120)
    assert run.exitcode == 128 + signal.SIGTERM


@needs_machine
def test_the_next_run_removes_what_a_killed_one_left_behind() -> None:
    run, hosts = start_run()
    run.kill()
    run.join(120)
    # The commands die with it, what they had started does not.
    wait_until(lambda: [name_of(process) for process in alive(hosts)].count("sh") == 0)
    assert len(namespaces_of(run.pid)) == 3
    with Network(1):
        assert not namespaces_of(run.pid)
        assert not alive(hosts)


@needs_machine
def test_the_namespaces_of_a_living_run_are_left_alone() -> None:
    run, hosts = start_run()
    try:
        with Network(1):
            assert len(namespaces_of(run.pid)) == 3
            assert sorted(alive(hosts)) == sorted(hosts)
    finally:
        run.terminate()
        run.join(120)


#: Sends 100 packets at once to an address that need not answer.
SEND_PACKETS = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(100):
    sender.sendto(bytes(1000), (sys.argv[1], 9))
"""


@needs_machine
def test_links_are_cut_and_mended_and_lose_packets(nothing_left: None) -> None:
    with Network(hosts=2, racks=2) as network:
        assert network.is_connected(0)
        network.cut(0)
        assert not network.is_connected(0)
        assert network.is_connected(1)
        network.mend(0)
        wait_until(lambda: network.is_connected(0))
        for lossy in (False, True):
            if lossy:
                network.lose_packets(0)
            others = network.packets_lost(1)
            assert run_job(network, [*python(SEND_PACKETS), network.address(1)]) == 0
            assert (network.packets_lost(0) > 0) == lossy
            assert network.packets_lost(1) == others
        network.lose_no_packets(0)
        before = network.packets_lost(0)
        assert run_job(network, [*python(SEND_PACKETS), network.address(1)]) == 0
        assert network.packets_lost(0) == before
        assert not network.is_parted()
        network.part()
        assert network.is_parted()
