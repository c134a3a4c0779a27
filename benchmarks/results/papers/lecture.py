"""The lecture on parameter servers and large batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import host_speed_report, large_batches, staleness_report
from benchmarks.results.exhibit import Exhibit, Picture, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.views import drawn_by, named, reported
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.converge import config_of
from lightning_pipesync.lab.bench.converge_report import by_method, rows_of
from lightning_pipesync.lab.bench.tables import number, table

_PREDICTED = "delay_compensation=momentum"
_POLICIES = ("sync", "k_sync,k=3", "k_batch_sync,k=3", "k_async,k=3", "k_batch_async", "async", "n_softsync,n=2", "ssp")
_METHODS = [
    "ddp",
    "local_sgd:period=8",
    *(f"parameter_server:policy={policy}" for policy in _POLICIES),
    *(f"parameter_server:policy={policy},{_PREDICTED}" for policy in ("k_batch_async", "async", "n_softsync,n=2")),
]
_HOSTS = "python -m benchmarks.converge --hosts 4 --compute 100ms --evaluations 57 --seeds 0 1"

JOBS = (
    Job(
        "servers_collectives",
        "python -m benchmarks.collectives --hosts 2 4 --rate 200mbit --sizes_mib 4 8 16 --codecs none --rounds 5",
        4,
    ),
    Job("hosts_slow", f"{_HOSTS} --slow 3:50% --methods {' '.join(_METHODS)}", 17),
    Job("hosts_stalls", f"{_HOSTS} --stalls 5%:10 --methods {' '.join(_METHODS)}", 22),
    Job("staleness", "python -m benchmarks.staleness", 4),
    Job("large_batches_digits", "python -m benchmarks.large_batches --task digits", 10),
    Job("large_batches_mnist1d", "python -m benchmarks.large_batches --task mnist1d", 4),
)


_LARGE_BATCHES = ("large_batches_digits", "large_batches_mnist1d")


def _hosts(records: Sequence[Record]) -> str:
    """Returns what each policy gains on hosts of different speed."""
    [record] = records
    [result] = record.results
    runs, rows = by_method(result), []

    def throughput(method: str) -> float:
        ends = [run["points"][-1] for run in runs[method]]
        return sum(end["steps"] / end["seconds"] for end in ends) / len(ends)

    for row in rows_of(result):
        staleness = [run["staleness"] for run in runs[row.method] if "staleness" in run]
        rows.append(
            [
                named(row.method),
                number(row.steps, ".0f"),
                number(row.seconds, ".1f"),
                number(row.speedup, ".2f"),
                f"{throughput(row.method) / throughput('ddp'):.2f}",
                number(host_speed_report.limit_of(result, row.method, config_of(row.method)), ".2f"),
                number(sum(staleness) / len(staleness) if staleness else None, ".2f"),
                number(row.best, ".2f"),
                f"{row.num_reached} of {row.num_seeds}",
            ]
        )
    headings = ["", "steps", "seconds", "speed-up", "throughput", "its limit", "mean staleness", "best", "reached"]
    return table(headings, rows)


def _one(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the only result."""
    [record] = records
    [result] = record.results
    return result


def _cost_model(records: Sequence[Record]) -> str:
    """Returns the seconds of an exchange of 100 MiB at 10 Gbit/s, with 50 microseconds per message."""
    link, num_bytes = LinkCost(alpha=50e-6, beta=8 / 10e9), 100 * MIB
    rows = []
    for ranks in (4, 16, 256, 4096):
        side = math.isqrt(ranks)
        seconds = [
            link.central_server(num_bytes, ranks),
            link.sharded_servers(num_bytes, ranks, servers=ranks // 2),
            link.sharded_servers(num_bytes, ranks),
            link.all_reduce(num_bytes, ranks),
            2 * link.torus_half(num_bytes, side, side),
            link.double_tree(num_bytes, ranks),
        ]
        rows.append([f"{ranks}", *(f"{value:.3f}" for value in seconds)])
    headings = ["ranks", "central server", "servers on half of the ranks", "servers on all ranks"]
    return table([*headings, "ring", "2-D torus", "double binary tree"], rows)


EXHIBITS: tuple[Exhibit, ...] = (
    Table("cost_model", (), _cost_model),
    reported("servers_collectives", "servers_collectives"),
    Table("hosts_slow", ("hosts_slow",), _hosts),
    Table("hosts_stalls", ("hosts_stalls",), _hosts),
    Table("staleness_counts", ("staleness",), lambda records: staleness_report.table_of_counts(_one(records))),
    Table("staleness_errors", ("staleness",), lambda records: staleness_report.table_of_policies(_one(records))),
    Table("staleness_downpour", ("staleness",), lambda records: staleness_report.table_of_downpour(_one(records))),
    *(
        drawn_by(name, "staleness", f"{name}.png")
        for name in ("staleness_counts", "staleness_errors", "staleness_downpour")
    ),
    *(Table(job, (job,), lambda records: large_batches.table_of(_one(records))) for job in _LARGE_BATCHES),
    *(drawn_by(job, job, "large_batches.png") for job in _LARGE_BATCHES),
    *(
        Picture(
            f"{job}_errors", (job,), lambda records, path: host_speed_report.draw_errors(records[0].results[0], path)
        )
        for job in ("hosts_slow", "hosts_stalls")
    ),
    Picture(
        "hosts_slow_staleness",
        ("hosts_slow",),
        lambda records, path: host_speed_report.draw_staleness(records[0].results[0], path),
    ),
)
