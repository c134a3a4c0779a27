"""``pipesync netlab``: what users write, hosts with the links that they were told to have, and nothing left of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.core.jobs import Lines
from lightning_pipesync.lab.bench.benchmark import check_hosts
from lightning_pipesync.lab.netlab import Network, Slow, run_job
from lightning_pipesync.lab.netlab.command import LinkOptions
from lightning_pipesync.lab.netlab.faults import parse_slow
from lightning_pipesync.lab.netlab.processes import NAMESPACES
from lightning_pipesync.lab.netlab.units import parse_rate, parse_seconds, parse_share

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


def python(script: str, *arguments: str) -> list[str]:
    """A program that imports nothing but the standard library."""
    return [sys.executable, "-I", "-S", "-c", script, *arguments]


def wait_until(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it is not so within {timeout_s} s"
        time.sleep(0.02)


def test_what_users_write_has_units() -> None:
    rates = {"1gbit": 10**9, "2.5Gbit": 2_500_000_000, "200mbit": 2 * 10**8, "100kbit": 10**5}
    assert {text: parse_rate(text) for text in rates} == rates
    assert [parse_seconds(text) for text in ("10s", "500ms", "2min", "1.5")] == [10, 0.5, 120, 1.5]
    assert parse_share("50%") == 0.5
    assert parse_slow(["3:50%", "3:200mbit"]) == ([Slow(3, 0.5)], {3: "200mbit"})
    wrong: list[tuple[Callable[[str], object], str]] = [
        *((parse_rate, text) for text in ("1 gigabit", "1gb", "gbit", "1000", "-1gbit", "", "1gbit/s", "50kbit")),
        *[(parse_seconds, "10h"), (parse_seconds, "s"), (parse_share, "0%"), (parse_share, "100%")],
    ]
    for parse, text in wrong:
        with pytest.raises(ValueError, match=rf"'{text}' is (not a|out of range)"):
            parse(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hosts 2 --rate 1gigabit -- true", "'1gigabit' is not a rate"),
        ("--hosts 0 -- true", "hosts must be between 1 and"),
        ("--hosts 4 --racks 3 -- true", "racks must divide the 4 hosts"),
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
        ("--hosts 2 --freeze one@1s -- true", "freeze: 'one@1s' names no host"),
        ("--hosts 2 --timeout 0s -- true", "timeout_s must be positive"),
        (
            "--hosts 2 --",
            "There is no command for the hosts to run: write it after two dashes, as in -- python train.py",
        ),
        ("--hosts 2", "write it after two dashes"),
        *(
            (f"{options}{command}", f" is no option: write -- before the command, as in pipesync netlab {line}\n")
            for options, command, line in (
                ("", "python train.py", "--hosts 4 -- python train.py"),
                ("--hosts 2 ", "python -u train.py", "--hosts 2 -- python -u train.py"),
                ("--rate 1gbit --hosts=2 ", "a.sh --epochs 3", "--rate 1gbit --hosts=2 -- a.sh --epochs 3"),
            )
        ),
        ("--hosts 2 --delay 40", "delay: '40' is not a delay"),
        ("--hosts 2 --delay=-1ms", "delay: '-1ms' is not a delay"),
        ("--hosts 2 --delay 4ms --jitter 40ms", "jitter='40ms' is more than delay='4ms'"),
        ("--hosts 2 --jitter 1ms", "jitter='1ms' is more than delay=None"),
        ("--hosts 2 --loss 200%", "loss: '200%' is not a share"),
        ("--hosts 2 --up_rate fast", "'fast' is not a rate"),
        ("--hosts 2 --uplink_delay 40ms", "uplink_delay is the link between racks"),
        ("--hosts 2 --racks 2 --uplink_jitter 5ms", "uplink_jitter='5ms' is more than uplink_delay=None"),
        ("--hosts 2 --racks 2 --uplink_loss 2", "uplink_loss: '2' is not a share"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_status_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["netlab", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["bench collectives", "plan"])
def test_commands_that_emulate_links_refuse_the_same(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--rate", "1gbit", "--hosts", "2", "--delay", "soon"]) == 2
    assert "delay: 'soon' is not a delay" in capsys.readouterr().err


def test_options_of_a_network_need_its_rate() -> None:
    with pytest.raises(ValueError, match="delay='40ms' is for an emulated network: give its rate"):
        check_hosts([2], LinkOptions(delay="40ms"))
    links = LinkOptions(rate="20mbit", delay="40ms", loss="0.1%")
    check_hosts([2], links)
    assert links.in_words() == "20mbit, delay 40ms, loss 0.1%"


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal() -> str:
        assert main(["netlab", "--hosts", "2", "--", "true"]) == 2
        return capsys.readouterr().err

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", "darwin")
        assert "on Linux only; this is darwin" in refusal()
    if sys.platform.startswith("linux"):
        monkeypatch.setattr("lightning_pipesync.lab.netlab.network.missing_capabilities", lambda: ["CAP_NET_ADMIN"])
        assert "lacks CAP_NET_ADMIN" in refusal()
        monkeypatch.setitem(sys.modules, "pyroute2", None)  # type: ignore[arg-type]  # as if it was not there
        assert 'pip install "lightning-pipesync[netlab]"' in refusal()


def test_output_is_cut_into_lines() -> None:
    lines = Lines()
    assert lines.add(b"one\ntw") == ["one"]
    assert lines.add(b"o\r\n 10%\r 20%\r") == ["two"]
    assert lines.add(b" 30%\nrest") == [" 30%"]
    assert [lines.end(), lines.end()] == [["rest"], []]


def rate_in_kernel(namespace: str, interface: str) -> int:
    """Returns the bits per second that the token bucket of an interface lets pass."""
    from pyroute2 import IPRoute, netns

    netns.pushns(namespace)
    try:
        with IPRoute() as route:
            [index] = route.link_lookup(ifname=interface)
            [queue] = [queue for queue in route.get_qdiscs(index) if queue["index"] == index]
            return 8 * int(queue.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"])
    finally:
        netns.popns()


@needs_machine
def test_hosts_have_names(nothing_left: None) -> None:
    """Otherwise c10d warns of each connection that it has no name; other names stay, as does the machine's own file."""
    script = "import socket; print([socket.gethostbyname(name) for name in ('host0', 'host1', 'localhost')], "
    script += "*(socket.getnameinfo((before + '198.18.0.2', 0), 0)[0] for before in ('', '::ffff:')))"
    before = Path("/etc/hosts").read_text()
    record = Record()
    with Network(2) as network:
        assert run_job(network, python(script), output=record, timeout_s=200) == 0, record.lines
    assert record.of(0) == record.of(1) == ["['198.18.0.1', '198.18.0.2', '127.0.0.1'] host1 host1"]
    assert Path("/etc/hosts").read_text() == before


@needs_machine
def test_gloo_reduces_over_links_with_the_rates_that_were_asked_for(nothing_left: None) -> None:
    """Also what a command leaves running ends with the job."""
    record = Record()
    links: dict[str, Any] = {"rate": "40mbit", "up_rate": "20mbit", "uplink": "8mbit", "host_rates": {1: "10mbit"}}
    with Network(2, racks=2, **links) as network:
        hosts = [network.namespace(host) for host in range(2)]
        switch = hosts[0].removesuffix("host0") + "switch"
        assert [rate_in_kernel(host, "eth0") for host in hosts] == [20_000_000, 10_000_000], "from the hosts"
        assert [rate_in_kernel(switch, f"host{host}") for host in range(2)] == [40_000_000, 10_000_000], "to them"
        for rack in range(2):
            assert rate_in_kernel(switch, f"up{rack}") == rate_in_kernel(switch, f"down{rack}") == 8_000_000
        words = shell(f"setsid sleep 1000 & exec {sys.executable} -c '{ALL_REDUCE}'")
        assert run_job(network, words, output=record, timeout_s=200) == 0, record.lines
    assert [line for _, line in record.lines if "sum" in line] == ["sum 3.0"] * 2
    assert not [line for _, line in record.lines if "hostname" in line]


@needs_machine
def test_each_line_has_its_hosts_number_and_the_worst_status_is_returned(
    capfd: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    script = "echo out; echo err >&2; [ $RANK = 0 ] || kill -ABRT $$"
    assert main(["netlab", "--hosts", "2", "--", *shell(script)]) == 128 + signal.SIGABRT
    said = ["[0] err", "[0] out", "[1] err", "[1] out", "[1] pipesync netlab: host 1 ended with exit status 134."]
    assert sorted(capfd.readouterr().out.splitlines()) == said
