"""The lecture on parameter servers and large batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import large_batches
from benchmarks.converge import config_of
from benchmarks.converge_report import rows_of
from benchmarks.learners import host_speed_report, staleness_report
from benchmarks.results.exhibit import Claim, Claims, Exhibit, Finding, Picture, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.views import collectives, drawn_by, runs_of, span, step_row
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.collectives import median_of
from lightning_pipesync.lab.bench.tables import table, table_of

_PREDICTED = "delay_compensation=momentum"
_POLICIES = ("sync", "k_batch_sync,k=3", "k_batch_async", "async", "n_softsync,n=2", "ssp")
_METHODS = [
    "ddp",
    "local_sgd:period=8",
    *(f"parameter_server:policy={policy}" for policy in _POLICIES),
    *(f"parameter_server:policy={policy},{_PREDICTED}" for policy in ("k_batch_async", "async", "n_softsync,n=2")),
]
#: Rounds with a quorum: an update has the mean of K movements, and counts for K of four hosts.
_ROUNDS = [
    "ddp",
    "local_sgd:period=8",
    *(f"parameter_server:policy=diloco,period=8,k={k},outer_lr={k / 4:g},outer_momentum=0" for k in (4, 3, 2, 1)),
]
_SLOW, _STALLS = "--slow 3:50%", "--stalls 5%:10"
_HOSTS = "python -m benchmarks.converge --hosts 4 --compute 100ms --evaluations 57 --seeds 0 1"

JOBS = (
    Job(
        "servers_collectives",
        "python -m benchmarks.collectives --hosts 2 4 --rate 200mbit --sizes_mib 4 8 16 --codecs none --rounds 5",
        4,
    ),
    Job("hosts_slow", f"{_HOSTS} {_SLOW} --methods {' '.join(_METHODS)}", 14),
    Job("hosts_stalls", f"{_HOSTS} {_STALLS} --methods {' '.join(_METHODS)}", 18),
    Job("hosts_slow_rounds", f"{_HOSTS} {_SLOW} --methods {' '.join(_ROUNDS)}", 10),
    Job("hosts_stalls_rounds", f"{_HOSTS} {_STALLS} --methods {' '.join(_ROUNDS)}", 10),
    Job("staleness", "python -m benchmarks.staleness", 4),
    Job("large_batches_digits", "python -m benchmarks.large_batches --task digits", 10),
    Job("large_batches_mnist1d", "python -m benchmarks.large_batches --task mnist1d", 4),
)


_LARGE_BATCHES = ("large_batches_digits", "large_batches_mnist1d")


def _hosts(records: Sequence[Record]) -> str:
    """Returns what each policy gains on hosts of different speed."""
    result = _one(records)
    columns = host_speed_report.columns_of(result, config_of)
    shown = ("", "steps", "seconds", "speed-up", "throughput", "limit by throughput", "mean staleness", "best")
    return table_of(rows_of(result), {name: columns[name] for name in (*shown, "reached")})


def _one(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the only result."""
    [record] = records
    [result] = record.results
    return result


def _servers(records: Sequence[Record]) -> str:
    """Returns what was measured, and what the cost model predicts."""
    return f"{collectives(records)}\nPredicted ms, and how far that is off:\n\n{collectives(records, _prediction)}"


def _prediction(row: dict[str, Any]) -> str | None:
    seconds = row["predicted"]
    return None if seconds is None else f"{1e3 * seconds:.1f} ({seconds / median_of(row) - 1:+.0%})"


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


def _policy(records: Sequence[Record], method: str, rate: float) -> dict[str, Any]:
    runs = _one(records)["policies"]
    found: dict[str, Any] = next(run for run in runs if (run["method"], run["learning_rate"]) == (method, rate))
    return found


def _unstable(records: Sequence[Record]) -> Finding:
    """Stale gradients at the larger of the rates."""
    rate = max(_one(records)["settings"]["learning_rates"])
    synchronous, stale = (_policy(records, method, rate) for method in ("sync", "async"))
    text = (
        f"30 learners, at a rate of {rate:g}: {stale['errors'][-1]:.1f}% test error with a mean staleness of "
        f"{stale['staleness']:.0f}, {synchronous['errors'][-1]:.1f}% synchronous"
    )
    return Finding(text, [stale["errors"][-1] > synchronous["errors"][-1]])


def _dependent(records: Sequence[Record]) -> Finding:
    """Fig. 9, at the larger of the rates: async with a rate that depends on the staleness, beside a fixed one.

    Whether it also beats the smaller one, which is fixed, decides, too.
    """
    rate = max(_one(records)["settings"]["learning_rates"])
    fixed = _policy(records, "async", rate)
    ruled = [
        run
        for run in _one(records)["policies"]
        if run["method"].startswith("async:staleness_lr=") and run["learning_rate"] == rate
    ]
    synchronous = min(_policy(records, name, rate)["errors"][-1] for name in ("sync", "k_sync:k=10"))
    errors = [run["errors"][-1] for run in ruled]
    least = min(_one(records)["settings"]["learning_rates"])
    at_least = _policy(records, "async", least)["errors"][-1]
    text = (
        f"at a rate of {rate:g} {span(errors, '.1f')}% test error with the three rules, "
        f"{fixed['errors'][-1]:.1f}% with a fixed rate; synchronous, with or without a quorum, {synchronous:.1f}%; "
        f"at {least:g} the fixed rate has {at_least:.1f}%"
    )
    return Finding(text, [max(errors) < fixed["errors"][-1], min(errors) <= synchronous + 1, min(errors) < at_least])


def _mean_staleness(records: Sequence[Record]) -> Finding:
    """n-softsync has a mean staleness of n."""
    counts = _one(records)["counts"]["1"]

    def mean(text: str) -> float:
        of_policy = counts[text]
        return float(sum(late * count for late, count in enumerate(of_policy)) / sum(of_policy))

    found = {n: mean(f"n_softsync:n={n}") for n in (1, 2, 15)}
    text = ", ".join(f"n = {n}: {staleness:.1f}" for n, staleness in found.items())
    close = [abs(staleness - n) <= max(1, 0.1 * n) for n, staleness in found.items()]
    return Finding(f"mean staleness with 30 learners, {text}", close)


def _large(records: Sequence[Record]) -> Finding:
    """How much of the accuracy of the smallest mini-batch linear scaling with warm-up gives back, at each size."""
    parts, gains = [], list[float]()
    for record in records:
        [result] = record.results
        accuracy = {
            (size, rule): fmean(
                run["accuracy"] for run in result["runs"] if (run["batch_size"], run["rule"]) == (size, rule)
            )
            for size, rule in dict.fromkeys((run["batch_size"], run["rule"]) for run in result["runs"])
        }
        _, *sizes = result["settings"]["batch_sizes"]
        won = {size: accuracy[size, "linear scaling, warm-up"] - accuracy[size, "unchanged"] for size in sizes}
        gains += won.values()
        shown = ", ".join(f"{size}: {points:+.1f}" for size, points in won.items())
        parts.append(f"{result['settings']['task']} {shown}")
    text = f"points that scaling with warm-up wins over an unchanged rate, by batch size: {'; '.join(parts)}"
    return Finding(text, [gain > 0 for gain in gains])


def _not_overlapped(records: Sequence[Record]) -> Finding:
    names = ("DDP", "all-reduce after backward")
    shares = {name: [step_row(run, name).scaling_efficiency for _, run in runs_of(records)] for name in names}
    over, behind = (span(found, ".0%") for found in shares.values())
    pairs = zip(shares["DDP"], shares["all-reduce after backward"], strict=True)
    text = f"scaling efficiency {behind} without overlap, {over} with it, at a ratio of 1"
    return Finding(text, [overlapped > serial for overlapped, serial in pairs])


_LECTURE = Claims(
    "lecture_claims",
    (
        Claim(
            "staleness",
            "stale gradients can make SGD unstable, slow convergence, and end at a higher error",
            ("staleness",),
            _unstable,
        ),
        Claim("n-softsync", "gradients are n updates late on average", ("staleness",), _mean_staleness),
        Claim(
            "Fig. 9",
            "with a learning rate that depends on the staleness, asynchronous SGD reaches synchronous accuracy",
            ("staleness",),
            _dependent,
        ),
        Claim(
            "large mini-batches",
            "linear scaling and warm-up keep the accuracy of batches of 256 up to 8,192",
            _LARGE_BATCHES,
            _large,
        ),
        Claim(
            "Figs. 2, 3",
            "scaling efficiency on 256 GPUs 95% with reductions under backward, 84% without",
            ("dear_systems_resnet50",),
            _not_overlapped,
        ),
    ),
)

EXHIBITS: tuple[Exhibit, ...] = (
    _LECTURE,
    Table("cost_model", (), _cost_model),
    Table("servers_collectives", ("servers_collectives",), _servers),
    *(Table(job, (job,), _hosts) for job in ("hosts_slow", "hosts_stalls", "hosts_slow_rounds", "hosts_stalls_rounds")),
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
