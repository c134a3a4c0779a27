"""``pipesync netlab``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipesync.lab.netlab.options import LinkOptions


@dataclass(frozen=True, kw_only=True)
class Netlab(LinkOptions):
    """Runs a multi-node job on hosts of a slow network, emulated on this machine: pipesync netlab ... -- COMMAND.

    Needs Linux, and root or a kernel that lets users create namespaces. The exit status is the worst of
    the hosts', where signal n counts as 128 + n, or 124 after a timeout.

    Attributes:
        hosts: How many hosts there are, numbered from 0.
        rate: Of each host's link in each direction, such as 200mbit or 1gbit.
        slow: HOST:SHARE% for a slow CPU (3:50%), HOST:RATE for a slow link (3:200mbit). May be given again.
        kill: HOST@TIME, such as 2@10s: kill all processes of the host then. May be given again.
        freeze: HOST@TIME, such as 1@5s: stop all processes of the host then, for good. May be given again.
        timeout: After which the job is ended, such as 90s or 5min.
        command: What every host runs. Write it after two dashes instead, as in -- python train.py.
    """

    hosts: int
    rate: str = "1gbit"
    slow: Sequence[str] = ()
    kill: Sequence[str] = ()
    freeze: Sequence[str] = ()
    timeout: str | None = None
    command: Sequence[str] = ()

    def run(self) -> int:
        """Runs the job and returns the exit status.

        Raises:
            ValueError: an option is wrong; nothing was started.
        """
        from lightning_pipesync.lab.netlab.faults import Fault, Freeze, Kill, parse_events, parse_slow
        from lightning_pipesync.lab.netlab.job import check_job, run_job
        from lightning_pipesync.lab.netlab.units import parse_seconds

        slow_hosts, host_rates = parse_slow(self.slow)
        faults: list[Fault] = [*slow_hosts, *parse_events(Kill, self.kill), *parse_events(Freeze, self.freeze)]
        timeout_s = None if self.timeout is None else parse_seconds(self.timeout)
        network = self.network(self.hosts, host_rates)
        check_job(self.hosts, self.command, faults, timeout_s)
        with network:
            return run_job(network, self.command, faults=faults, timeout_s=timeout_s)
