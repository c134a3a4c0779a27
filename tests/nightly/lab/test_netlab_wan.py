"""Links as they are between cities, in ``pipesync netlab``: delays, jitter, loss, and less bandwidth up than down."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from pathlib import Path

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.lab.netlab import Network, network, run_job
from lightning_pipesync.lab.netlab.forwarder import Link, Packet, Way
from lightning_pipesync.lab.netlab.forwarder import Network as Forwarded
from tests.drill.links import Links
from tests.nightly.lab.test_netlab import PROCESSES, _run, at_most, name_of, transfer_rates, without_root
from tests.quick.lab.test_netlab import Record, namespaces_of, nothing_left, python, shell, wait_until

__all__ = ["nothing_left"]  # a fixture


@pytest.fixture
def tun(machine: None) -> None:
    """Skips where no TUN device can be made."""
    try:
        network.check_devices()
    except RuntimeError as error:
        pytest.skip(str(error))


needs_tun = pytest.mark.usefixtures("tun")

#: Host 0 exchanges a byte with each other host, ten times, and prints the milliseconds of each round trip.
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
        for _ in range(10):
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


#: How many segments of TCP this host has sent again.
RETRANSMITTED = """
from pathlib import Path
names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
print("again", dict(zip(names, values))["RetransSegs"])
"""


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


# --- hosts


def test_what_the_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], machine: None, nothing_left: None
) -> None:
    monkeypatch.setattr("lightning_pipesync.lab.netlab.forwarder.DEVICE", "/dev/no-such-device")
    assert main(["netlab", "--hosts", "2", "--delay", "1ms", "--", "true"]) == 2
    assert "need TUN devices (CONFIG_TUN), and this process cannot open /dev/no-such-device" in capsys.readouterr().err


@needs_tun
def test_a_round_trip_takes_twice_the_delay_at_least_and_racks_are_farther(nothing_left: None) -> None:
    with Network(4, racks=2, delay="3ms", jitter="2ms", uplink_delay="20ms") as network:
        record = Record()
        assert run_job(network, python(PING), output=record, timeout_s=200) == 0, record.lines
    neighbor, *others = json.loads(record.of(0)[0])
    assert min(neighbor) >= 2
    assert all(trip >= 42 for host in others for trip in host)


@needs_tun
def test_a_hosts_slower_direction_is_that_from_it(nothing_left: None) -> None:
    """Both send at 10 Mbit/s, whatever they could receive; and the other way round."""
    with Network(2, rate="100mbit", up_rate="10mbit", host_rates={1: "40mbit"}, delay="1ms") as network:
        assert (network.rates, network.up_rates) == ([100_000_000, 40_000_000], [10_000_000, 10_000_000])
        [link] = transfer_rates(network)
    assert max(link) <= at_most(10), link
    with Network(2, rate="10mbit", up_rate="100mbit", delay="1ms") as network:
        [link] = transfer_rates(network)
    assert max(link) <= at_most(10), link


@needs_tun
def test_packets_are_lost_and_segments_sent_again(nothing_left: None) -> None:
    record = Record()
    with Network(2, loss="5%") as network:
        transfer_rates(network)  # of which all bytes arrive
        assert run_job(network, python(RETRANSMITTED), output=record) == 0
    assert all(int(record.of(host)[-1].split()[1]) > 5 for host in (0, 1)), "of 724 segments"


@needs_tun
def test_links_that_are_forwarded_cannot_be_cut(nothing_left: None) -> None:
    with Network(2, racks=2, delay="1ms") as network, pytest.raises(RuntimeError, match="its links cannot be cut"):
        Links(network)


# --- nothing is left


@needs_tun
def test_a_forwarder_that_ends_ends_the_job(nothing_left: None) -> None:
    with Network(2, delay="1ms") as network:
        forwarder = network.forwarder
        assert forwarder is not None
        assert run_job(network, shell("exit $RANK")) == 1
        assert forwarder.poll() is None, "a host that fails leaves it alone"
        with pytest.raises(RuntimeError, match="forwarder of the network's packets has ended"):
            run_job(network, shell("echo x; sleep 1000"), output=lambda host, line: forwarder.kill())
        forwarder.wait()
        with pytest.raises(RuntimeError, match="forwarder of the network's packets has ended"):
            run_job(network, shell("sleep 1000"))
    assert forwarder.poll() == -signal.SIGKILL


def forwarders_of(process: int) -> list[int]:
    """Programs that a process has started, which forward packets for its hosts."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process and any(word.endswith("netlab/forwarder.py") for word in words):
            found.append(int(path.name))
    return found


@needs_tun
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_no_forwarder(number: signal.Signals, tmp_path: Path) -> None:
    script = shell(f"touch {tmp_path}/$RANK; sleep 1000")
    run = PROCESSES.Process(target=_run, args=(["netlab", "--hosts", "2", "--delay", "1ms", "--", *script], None))
    run.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    [forwarder] = forwarders_of(run.pid)
    os.kill(run.pid, number)
    run.join(120)
    wait_until(lambda: not name_of(forwarder))
    if number is signal.SIGKILL:
        with Network(1):
            pass  # which removes what is left
    assert not namespaces_of(run.pid)


@needs_tun
def test_without_root_packets_are_forwarded_in_a_user_namespace(nothing_left: None) -> None:
    job = without_root("--delay", "1ms", "--", "echo", "{rank}")
    assert sorted(job.stdout.splitlines()) == ["[0] 0", "[1] 1"]
    assert (job.returncode, job.stderr) == (0, "")
