"""Links as they are between cities, in ``pipesync netlab``: delays, jitter, loss, and less bandwidth up than down."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.lab.bench.benchmark import make_hosts
from lightning_pipesync.lab.netlab import Network, forwarding, run_job
from lightning_pipesync.lab.netlab.forwarder import Link, Packet, Way
from lightning_pipesync.lab.netlab.forwarder import Network as Forwarded
from lightning_pipesync.lab.netlab.options import LinkOptions
from tests.nightly.lab.test_netlab import (
    PROCESSES,
    Record,
    _run,
    fastest_rates,
    namespaces_of,
    needs_machine,
    nothing_left,
    shell,
    transfer_rates,
    wait_until,
    without_root,
)

__all__ = ["nothing_left"]  # a fixture


@pytest.fixture
def tun(machine: None) -> None:
    """Skips where no TUN device can be made."""
    try:
        forwarding.check_devices()
    except RuntimeError as error:
        pytest.skip(str(error))


needs_tun = pytest.mark.usefixtures("tun")

#: Host 0 exchanges a byte with each other host, ROUNDS times, and prints the milliseconds of each round trip.
PING = """
import json, os, socket, time
rank, others = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1

def without_delay(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

if rank == 0:
    server = socket.create_server(("", 29500))
    connections = [without_delay(server.accept()[0]) for _ in range(others)]
    connections = {connection.recv(1)[0]: connection for connection in connections}
    trips = []
    for peer in sorted(connections):
        trips.append([])
        for _ in range(ROUNDS):
            start = time.monotonic()
            connections[peer].sendall(b"?")
            connections[peer].recv(1)
            trips[-1].append(1e3 * (time.monotonic() - start))
    print(json.dumps(trips))
else:
    while True:
        try:
            connection = without_delay(socket.create_connection((os.environ["MASTER_ADDR"], 29500)))
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes([rank]))
    while connection.recv(1):
        connection.sendall(b"!")
"""

#: Host 0 sends 4000 datagrams to host 1, a few at a time, which prints how many have come.
DATAGRAMS = """
import os, socket, sys, time
endpoint = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    for _ in range(400):
        for _ in range(10):
            endpoint.sendto(b"datagram", ("198.18.0.2", 29501))
        time.sleep(0.002)
else:
    endpoint.setsockopt(socket.SOL_SOCKET, 33, 2**22)  # SO_RCVBUFFORCE: none is lost here
    endpoint.bind(("", 29501))
    endpoint.settimeout(60)
    open(sys.argv[1], "w").close()
    came = 0
    try:
        while True:
            endpoint.recv(100)
            came += 1
            endpoint.settimeout(3)
    except TimeoutError:
        print(came)
"""

#: How many segments of TCP this host has sent again.
RETRANSMITTED = """
from pathlib import Path
names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
print("again", dict(zip(names, values))["RetransSegs"])
"""


# --- what a user writes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--delay 40", "delay: '40' is not a delay: write a number and us, ms or s"),
        ("--delay soon", "delay: 'soon' is not a delay"),
        ("--delay=-1ms", "delay: '-1ms' is not a delay"),
        ("--delay 4ms --jitter 40", "jitter: '40' is not a delay"),
        ("--delay 4ms --jitter 40ms", "jitter='40ms' is more than delay='4ms'"),
        ("--jitter 1ms", "jitter='1ms' is more than delay=None"),
        ("--loss 2", "loss: '2' is not a share"),
        ("--loss 200%", "loss: '200%' is not a share"),
        ("--loss 0.001", "loss: '0.001' is not a share"),
        ("--up_rate fast", "'fast' is not a rate"),
        ("--uplink_delay 40ms", "uplink_delay is the link between racks"),
        ("--uplink_loss 1%", "uplink_loss is the link between racks"),
        ("--racks 2 --uplink_delay 40", "uplink_delay: '40' is not a delay"),
        ("--racks 2 --uplink_delay 4ms --uplink_jitter 5ms", "uplink_jitter='5ms' is more than uplink_delay='4ms'"),
        ("--racks 2 --uplink_loss 2", "uplink_loss: '2' is not a share"),
    ],
)
@pytest.mark.parametrize("command", ["netlab", "bench collectives --rate 1gbit", "plan --rate 1gbit"])
def test_what_the_user_got_wrong_is_one_line_and_names_the_option(
    command: str, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--hosts", "2", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_options_of_a_network_need_its_rate() -> None:
    with pytest.raises(ValueError, match="delay='40ms' is for an emulated network: give its rate"):
        make_hosts([2], LinkOptions(delay="40ms"))
    (hosts,) = make_hosts([2], LinkOptions(rate="20mbit", delay="40ms", loss="0.1%"))
    assert hosts.links.in_words() == "20mbit, delay 40ms, loss 0.1%"


def test_what_the_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], machine: None, nothing_left: None
) -> None:
    monkeypatch.setattr("lightning_pipesync.lab.netlab.forwarder.DEVICE", "/dev/no-such-device")
    assert main(["netlab", "--hosts", "2", "--delay", "1ms", "--", "true"]) == 2
    assert "need TUN devices (CONFIG_TUN), and this process cannot open /dev/no-such-device" in capsys.readouterr().err
    assert main(["netlab", "--hosts", "2", "--", "true"]) == 0


# --- the forwarder's parts


def bundle(payload: bytes, each: int, sequence: int = 2**32 - 2000) -> Packet:
    """A bundle of TCP, as the kernel hands it over, with FIN, PSH, ACK and CWR."""
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 7, 8 << 4, 0x99, 512, 0, 0) + bytes(range(12))
    addresses = bytes([198, 18, 0, 1, 198, 18, 0, 2])
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 52 + len(payload), 65535, 0, 64, 6, 0) + addresses
    return Packet(struct.pack("=BBHHHH", 1, 1, 52, each, 20, 16) + ip + tcp + payload)


def internet_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    return total % 0xFFFF


def test_of_a_bundle_the_packets_are_lost_that_are_to_be_lost() -> None:
    payload = bytes(random.Random(0).randrange(256) for _ in range(9 * 1000 + 10))
    whole = bundle(payload, 1000)
    assert (whole.number, whole.num_bytes) == (10, 10 * 52 + len(payload))
    assert list(whole.without([])) == [whole]
    assert list(whole.without(range(10))) == []
    for lost in ([0], [9], [4], [0, 1, 5], [2, 4, 9]):
        came: dict[int, bytes] = {}
        flags = []
        for part in whole.without(lost):
            _, kind, _, each, start, offset = struct.unpack_from("=BBHHHH", part.data)
            ip, tcp, content = part.data[10:30], part.data[30:62], part.data[62:]
            assert (start, offset) == (20, 16)
            assert (kind, each) == ((1, 1000) if len(content) > 1000 else (0, 0))
            assert part.number == -(-len(content) // 1000)
            length, identity = struct.unpack_from("!HH", ip, 2)
            assert length == 52 + len(content)
            assert internet_sum(ip) == 0, "the checksum of IP"
            pseudo_header = ip[12:] + struct.pack("!HH", 6, 32 + len(content))
            assert (struct.unpack_from("!H", tcp, 16)[0] - internet_sum(pseudo_header)) % 0xFFFF == 0
            begin = (struct.unpack_from("!I", tcp, 4)[0] - (2**32 - 2000)) % 2**32
            assert identity == (65535 + begin // 1000) % 2**16
            flags.append((begin, begin + len(content), tcp[13]))
            for number in range(begin, begin + len(content), 1000):
                came[number // 1000] = content[number - begin : number - begin + 1000]
            assert part.receiver == bytes([198, 18, 0, 2])
        assert came == {n: payload[1000 * n : 1000 * n + 1000] for n in range(10) if n not in lost}
        for begin, end, flag in flags:
            assert bool(flag & 0x80) == (begin == 0), "CWR is the first packet's"
            assert bool(flag & 0x01) == bool(flag & 0x08) == (end == len(payload)), "FIN and PSH are the last packet's"


def test_a_share_of_packets_is_lost_whatever_they_are_bundled_in() -> None:
    way = Way(loss=0.01, random=random.Random(0).random)
    sizes = [1, 44, 7] * 4000
    lost = [way.lost_of(size) for size in sizes]
    assert all(0 <= one < size for ones, size in zip(lost, sizes, strict=True) for one in ones)
    assert sum(map(len, lost)) == pytest.approx(0.01 * sum(sizes), rel=0.1)
    assert sum(len(ones) for ones in lost[::3]) == pytest.approx(0.01 * 4000, rel=0.5)
    assert Way().lost_of(1000) == []


def test_packets_are_late_by_the_delay_and_do_not_overtake() -> None:
    way = Way(delay_s=0.04, jitter_s=0.004, random=random.Random(0).random)
    apart = [way.arrives(moment) - moment for moment in range(1000)]
    assert 0.036 <= min(apart) < 0.037 < 0.043 < max(apart) <= 0.044
    together = [way.arrives(1000 + moment / 1e5) for moment in range(1000)]
    assert together == sorted(together)


def test_a_link_lets_a_burst_pass_then_its_rate_and_drops_what_waits_too_long() -> None:
    link = Link(rate=1e6, burst=1e4, longest_s=0.1)
    assert link.leaves(0.0, 10_000) == 0.0
    assert link.leaves(0.0, 50_000) == pytest.approx(0.05)
    assert link.leaves(0.0, 50_001) is None
    assert link.leaves(0.0, 49_999) == pytest.approx(0.1, abs=1e-5)
    assert link.leaves(1.0, 10_000) == 1.0


def test_a_path_between_racks_has_both_delays_and_the_uplinks() -> None:
    """A packet that has come first from afar does not hold up one that arrives before it from nearby."""
    came: list[tuple[int, bytes]] = []
    network = Forwarded(
        *([0, 0, 1], [1e6] * 3, 1e5, 0.0, 1000, 10.0),
        *((0.001, 0.0, 0.0), (0.5, 0.0, 0.0), lambda host, data: came.append((host, data))),
    )
    far, near = (Packet(bytes(10) + content * 1000) for content in (b"F", b"N"))
    network.send(0, 1, near, 0.0)
    network.send(2, 1, far, 0.0)
    network.send(2, 1, far, 0.0)
    network.send(0, 1, near, 0.0)
    assert network.next_s(0.0) == pytest.approx(0.001)
    network.go_on(0.0015)
    assert came == [(1, near.data)]
    network.go_on(0.0021)
    assert came == [(1, near.data)] * 2
    network.go_on(0.5)
    assert len(came) == 2
    network.go_on(0.5011)
    assert came[2:] == [(1, far.data)]
    network.go_on(0.5111)  # the second one has waited 10 ms for the uplink
    assert came[2:] == [(1, far.data)] * 2
    assert network.next_s(1.0) is None


def test_a_packet_that_has_waited_for_an_uplink_is_not_overtaken() -> None:
    """Also if it is looked at only when the next one has come."""
    came: list[bytes] = []
    network = Forwarded(
        *([0, 1], [1e6] * 2, 1e5, 0.0, 1000, 10.0),
        *((0.001, 0.0, 0.0), (0.5, 0.0, 0.0), lambda _, data: came.append(data)),
    )
    sent = [Packet(bytes(10) + content * 1000) for content in (b"A", b"B", b"C")]
    for packet, moment in zip(sent, (0.0, 0.0, 0.0201), strict=True):  # B has left the uplink after 10 ms
        network.send(0, 1, packet, moment)
    network.go_on(10.0)
    assert came == [packet.data for packet in sent]


# --- hosts


def round_trips(network: Network, rounds: int = 10) -> list[list[float]]:
    record = Record()
    script = PING.replace("ROUNDS", str(rounds))
    assert run_job(network, [sys.executable, "-I", "-S", "-c", script], output=record, timeout_s=200) == 0, record.lines
    trips: list[list[float]] = json.loads(record.of(0)[0])
    return trips


@needs_tun
def test_a_round_trip_takes_twice_the_delay_and_racks_are_farther(nothing_left: None) -> None:
    options: dict[str, Any] = {"delay": "3ms", "jitter": "2ms", "uplink_delay": "20ms"}
    with Network(4, racks=2, **options) as network:
        neighbor, *others = round_trips(network)
    assert min(neighbor) >= 2
    assert max(neighbor) - min(neighbor) > 0.2, "jitter"
    assert all(trip >= 42 for host in others for trip in host)
    assert min(neighbor) < min(map(min, others))


@needs_machine
@pytest.mark.parametrize("delay", [None, "1ms"])
def test_a_hosts_slower_direction_is_that_from_it(
    delay: str | None, nothing_left: None, request: pytest.FixtureRequest
) -> None:
    """Both send at 10 Mbit/s, whatever they could receive."""
    if delay is not None:
        request.getfixturevalue("tun")
    with Network(2, rate="100mbit", up_rate="10mbit", host_rates={1: "40mbit"}, delay=delay) as network:
        assert (network.rates, network.up_rates) == ([100_000_000, 40_000_000], [10_000_000, 10_000_000])
        _, link = transfer_rates(network, 1)
    assert max(link) < 12, f"{link}, of which a burst is 7%"
    with Network(2, rate="10mbit", up_rate="100mbit", delay=delay) as network:
        _, link = transfer_rates(network, 1)
    assert max(link) < 12, link
    with Network(2, rate="100mbit", delay=delay) as network:
        _, link = fastest_rates(network, 4, lambda _, link: min(link) > 2 * 12)
    assert min(link) > 2 * 12, link


@needs_tun
def test_of_datagrams_the_share_is_lost(nothing_left: None, tmp_path: Path) -> None:
    record = Record()
    with Network(2, loss="50%") as network:
        words = [sys.executable, "-I", "-S", "-c", DATAGRAMS, str(tmp_path / "listens")]
        assert run_job(network, words, output=record, timeout_s=200) == 0, record.lines
    assert 0 < int(record.of(1)[-1]) < 2500, "half of 4000, or fewer if the machine is busy"


@needs_tun
def test_lost_segments_are_sent_again_and_all_bytes_arrive(nothing_left: None) -> None:
    counts = {}
    for loss in ("1%", None):
        with Network(2, rate="100mbit", delay="1ms", loss=loss) as network:
            transfer_rates(network, 8)
            record = Record()
            assert run_job(network, [sys.executable, "-I", "-S", "-c", RETRANSMITTED], output=record) == 0
            counts[loss] = [int(record.of(host)[0].split()[1]) for host in (0, 1)]
    # 8 MiB are 5793 segments.
    assert all(count > 20 for count in counts["1%"]), counts
    assert sum(counts[None]) < sum(counts["1%"]) / 2, counts


@needs_tun
def test_links_that_are_forwarded_cannot_be_cut(nothing_left: None) -> None:
    with Network(2, racks=2, delay="1ms") as network:
        refused: list[Callable[[], object]] = [network.part, network.is_parted]
        refused += [lambda: network.cut(0), lambda: network.mend(0), lambda: network.is_connected(0)]
        refused += [lambda: network.lose_packets(0), lambda: network.packets_lost(0)]
        for call in refused:
            with pytest.raises(RuntimeError, match="its links cannot be cut"):
                call()


# --- nothing is left


@needs_tun
def test_a_forwarder_that_ends_ends_the_job(nothing_left: None) -> None:
    with Network(2, delay="1ms") as network:
        assert network.forwarder is not None

        def output(host: int, line: str) -> None:
            assert network.forwarder is not None
            network.forwarder.kill()

        with pytest.raises(RuntimeError, match="forwarder of the network's packets has ended"):
            run_job(network, shell("echo x; sleep 1000"), output=output)
        with pytest.raises(RuntimeError, match="forwarder of the network's packets has ended"):
            run_job(network, shell("sleep 1000"))
    assert network.forwarder.poll() == -signal.SIGKILL


@needs_tun
def test_a_forwarder_that_cannot_start_is_told_and_all_is_undone(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pipesync.lab.netlab.kernel.INTERFACE", "no/name")
    with pytest.raises(RuntimeError, match="does not start: /dev/net/tun: Invalid argument"), Network(2, delay="1ms"):
        pass


@needs_tun
def test_a_host_that_fails_leaves_the_forwarder_alone(nothing_left: None) -> None:
    with Network(2, delay="1ms") as network:
        assert run_job(network, shell("exit $RANK")) == 1
        assert network.forwarder is not None
        assert network.forwarder.poll() is None
        assert len(round_trips(network, 2)) == 1
    assert network.forwarder.poll() is not None


def forwarders() -> list[int]:
    """Processes that forward packets for the hosts of others."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if any(word.endswith("netlab/forwarder.py") for word in words):
            found.append(int(path.parent.name))
    return found


@needs_tun
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_no_forwarder(number: signal.Signals, tmp_path: Path) -> None:
    before = set(forwarders())
    script = shell(f"touch {tmp_path}/$RANK; sleep 1000")
    run = PROCESSES.Process(target=_run, args=(["netlab", "--hosts", "2", "--delay", "1ms", "--", *script], None))
    run.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    (forwarder,) = set(forwarders()) - before
    os.kill(run.pid, number)
    run.join(120)
    wait_until(lambda: forwarder not in forwarders())
    if number is signal.SIGKILL:
        with Network(1):
            pass  # which removes what is left
    assert not namespaces_of(run.pid)


@needs_tun
def test_without_root_packets_are_forwarded_in_a_user_namespace(nothing_left: None) -> None:
    job = without_root("--delay", "1ms", "--", "echo", "{rank}")
    assert sorted(job.stdout.splitlines()) == ["[0] 0", "[1] 1"]
    assert (job.returncode, job.stderr) == (0, "")
