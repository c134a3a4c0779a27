"""``pipesync netlab``."""

from __future__ import annotations

from collections.abc import Sequence


def netlab(
    hosts: int,
    rate: str = "1gbit",
    racks: int = 1,
    uplink: str | None = None,
    slow: Sequence[str] = (),
    kill: Sequence[str] = (),
    freeze: Sequence[str] = (),
    timeout: str | None = None,
    command: Sequence[str] = (),
) -> int:
    """Runs a multi-node job on hosts of a slow network, emulated on this machine: pipesync netlab ... -- COMMAND.

    Needs Linux, and root or a kernel that lets users create namespaces. The exit status is the worst of
    the hosts', where signal n counts as 128 + n, or 124 after a timeout.

    Args:
        hosts: how many hosts there are, numbered from 0.
        rate: of each host's link in each direction, such as 200mbit or 1gbit.
        racks: how many racks the hosts are divided into.
        uplink: rate between each rack and the others, in each direction. The default is that of a host's link.
        slow: HOST:SHARE% for a slow CPU (3:50%), HOST:RATE for a slow link (3:200mbit). May be given again.
        kill: HOST@TIME, such as 2@10s: kill all processes of the host then. May be given again.
        freeze: HOST@TIME, such as 1@5s: stop all processes of the host then, for good. May be given again.
        timeout: after which the job is ended, such as 90s or 5min.
        command: what every host runs. Write it after two dashes instead, as in -- python train.py.
    """
    from lightning_pipesync.lab.netlab.faults import Fault, Freeze, Kill, parse_events, parse_slow
    from lightning_pipesync.lab.netlab.job import check_job, run_job
    from lightning_pipesync.lab.netlab.network import Network
    from lightning_pipesync.lab.netlab.units import parse_seconds

    slow_hosts, host_rates = parse_slow(slow)
    faults: list[Fault] = [*slow_hosts, *parse_events(Kill, kill), *parse_events(Freeze, freeze)]
    timeout_s = None if timeout is None else parse_seconds(timeout)
    network = Network(hosts, rate, racks, uplink, host_rates)
    check_job(hosts, command, faults, timeout_s)
    with network:
        return run_job(network, command, faults=faults, timeout_s=timeout_s)
