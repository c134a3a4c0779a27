"""What no paper has: the demo, how far plans are off, what codecs and methods cost, and topologies on racks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import plan_accuracy_report
from benchmarks.converge_report import Row, rows_of
from benchmarks.results.exhibit import Exhibit, Gain, Gains, Picture, Sentence, Table
from benchmarks.results.job import ROOT, Job, Record
from benchmarks.results.papers.dear import DEAR, SYSTEMS_JOBS
from benchmarks.results.papers.ea_pipe import seconds_of
from benchmarks.results.papers.local_sgd import LOCAL_SGD
from benchmarks.results.papers.selsync import ON_4_HOSTS
from benchmarks.results.views import collectives, cost_of, reachable, reported, runs_of, span, step_row, training_row
from lightning_pipesync.lab.bench.tables import table_of

#: Two racks of two hosts, whose uplinks have a quarter of the bandwidth of a host's link.
_RACKS = "--hosts 4 --racks 2 --rate 200mbit --uplink 50mbit"

JOBS = (
    Job("demo", "python examples/slow_network.py examples/digits.py", 3),
    *(
        Job(
            f"plan_accuracy_{model.replace('-', '_')}",
            f"python -m benchmarks.plan_accuracy --hosts 2 4 8 --rates 200mbit --rounds 2 --models emulated-{model}",
            23,
        )
        for model in ("resnet50", "bert-base")
    ),
    Job("overhead", "python -m benchmarks.overhead --steps 20", 3),
    Job("overhead_adamw", "python -m benchmarks.overhead --steps 20 --optimizer adamw", 3),
    Job("codecs", "python -m benchmarks.codecs --threads 1", 1),
    Job(
        "topologies_collectives",
        f"pipesync bench collectives {_RACKS} --topologies torus2d tree --codecs int8 --sizes_mib 0.0625 1 4",
        6,
    ),
    Job(
        "topologies_step",
        f"pipesync bench step {_RACKS} --model emulated-resnet50 --scale 0.04 --bucket_mb 1 --ratio 1 --methods ddp "
        "dear dear:topology=torus2d dear:topology=tree pipe_sgd pipe_sgd:topology=torus2d pipe_sgd:topology=tree "
        "--rounds 3 --steps 2",
        6,
    ),
)
_TOPICS = ("topics_quality", "topics_time_50", "topics_time_200")
_ACCURACY = tuple(job.name for job in JOBS if job.name.startswith("plan_accuracy"))


def _dear(records: Sequence[Record]) -> str:
    """With the best of the bucket sizes, or as it finds one, beside DDP with the best of its own."""
    over = []
    for record in records:
        if record.name in _ACCURACY:
            over += [plan_accuracy_report.over_ddp(plan, "dear") for plan in record.results]
        else:
            runs = [run for _, run in runs_of([record]) if 0.8 < cost_of(run).ratio < 1.3]
            over += [step_row(run, DEAR if record.name in SYSTEMS_JOBS else "dear").over_ddp for run in runs]
    return (
        f"a step {span(over)} times as fast as DDP's, {median(over):.2f} in the median, both at their best bucket "
        "sizes, on 2 to 8 hosts where communication takes as long as computation"
    )


def _local_sgd(records: Sequence[Record]) -> str:
    quality, *timed = records
    ours, ddp = (training_row(quality, name) for name in (LOCAL_SGD, "ddp"))
    if ours.steps is None or ddp.steps is None or ours.mib is None or ddp.mib is None:
        return "the target is not reached"
    seconds = [[training_row(record, name).step_seconds for name in (LOCAL_SGD, "ddp")] for record in timed]
    slow, fast = (ours.steps * one / (ddp.steps * other) for one, other in seconds)
    target, less = quality.results[0]["target"], ddp.mib / ours.mib
    time = f"{slow:.0%} of DDP's time at 50 Mbit/s, and {fast:.0%} at 200 Mbit/s"
    return f"a perplexity of {target:g} on 4 hosts in {time}, with a {less:.0f}th of its bytes"


def _selsync(records: Sequence[Record]) -> str:
    """Of all trainings of Table I with 4 workers."""
    rows = [row for record in records for row in _rows_of(record, "selsync")]
    found = [row.speedup for row in rows if row.speedup]
    if not found:
        return "the target is not reached"
    number = f"{len(found)} of {len(rows)} trainings of five tasks"
    return f"{span(found, '.1f')} times as soon at the target in {number}, at 200 Mbit/s on 4 hosts; the others miss it"


def _pipe_sgd(records: Sequence[Record]) -> str:
    alexnet, *plans = records
    runs = [run for _, run in runs_of([alexnet])]
    plain = [step_row(run, "pipe_sgd").over_ddp for run in runs if 0.8 < cost_of(run).ratio < 1.3]
    plain += [plan_accuracy_report.over_ddp(plan, "pipe_sgd") for plan in _plans(plans)]
    int8 = [step_row(run, "pipe_sgd (compression=int8)").over_ddp for run in runs if 1.6 < cost_of(run).ratio < 2.5]
    of_int8 = f"int8 {span(int8)} times at a ratio of 2 (AlexNet)"
    return f"a step {span(plain)} times as fast as DDP's at a ratio of 1, on 2 to 8 hosts; {of_int8}"


def _servers(records: Sequence[Record]) -> str:
    parts = []
    for record, shown in zip(records, ("a slow host", "stalls"), strict=True):
        rows = [row for row in _rows_of(record, "parameter_server") if "delay_compensation" in row.method]
        found = [row.speedup for row in rows if row.speedup]
        parts.append(f"{span(found, '.1f')} times as soon with {shown}" if found else f"not with {shown}")
    return f'with `delay_compensation="momentum"`, 98% of the digits {", ".join(parts)}'


def _ea_pipe(records: Sequence[Record]) -> str:
    runs = [run for _, run in runs_of(records)]
    ours, synchronous = (
        span([run["stage_seconds"] / seconds_of(run, name) for run in runs for name in names], ".0%")
        for names in (("ea_pipe",), ("gpipe", "gpipe:micro_batches=16", "1f1b"))
    )
    return f"{ours} of the throughput of stages that never wait, as PipeDream; GPipe and 1F1B {synchronous}"


def _rows_of(record: Record, method: str) -> list[Row]:
    rows = [row for result in record.results for row in rows_of(reachable(result))]
    return [row for row in rows if row.method.partition(":")[0] == method]


_GAINS = (
    Gain(
        "dear",
        ("dear_ratios_resnet50", "dear_ratios_bert_base", *SYSTEMS_JOBS, *_ACCURACY),
        _dear,
        "none: DDP's weights, [but for rounding](bit_for_bit.md); 1 to 3% of a step at ratios up to 0.5",
    ),
    Gain(
        "local_sgd",
        _TOPICS,
        _local_sgd,
        "another algorithm; quality, with long periods",
    ),
    Gain(
        "selsync",
        ON_4_HOSTS,
        _selsync,
        "another algorithm; quality, with many workers, and with Adam, less with an outer step",
    ),
    Gain(
        "pipe_sgd",
        ("pipe_sgd_ratios", *_ACCURACY),
        _pipe_sgd,
        "gradients are a step late; computing them at predicted weights takes some of a step",
    ),
    Gain("parameter_server", ("hosts_slow", "hosts_stalls"), _servers, "by policy; stale gradients take more steps"),
    Gain("ea_pipe", ("ea_pipe_throughput",), _ea_pipe, "another algorithm; a higher error than SGD's"),
)


def _demo(records: Sequence[Record]) -> str:
    [result] = records[0].results
    return table_of(
        result["table"],
        {
            "": lambda row: f"`{row['strategy']}`",
            "test accuracy %": lambda row: f"{100 * row['accuracy']:.2f}",
            "steps": lambda row: f"{row['steps']}",
            "seconds": lambda row: f"{row['seconds']:.1f}",
            "times as fast as DDP": lambda row: f"{row['times_as_fast']:.2f}",
            "MiB": lambda row: f"{row['mib_sent']:.1f}",
        },
    )


def _what_the_demo_shows(records: Sequence[Record]) -> str:
    rows = {row["strategy"]: row for row in records[0].results[0]["table"]}
    ddp, dear = rows["ddp"], rows["dear"]
    local = [rows["selsync"], rows["local_sgd"]]
    seconds = " and ".join(f"{row['seconds']:.0f} s" for row in local)
    shares = " and ".join(f"{row['mib_sent'] / ddp['mib_sent']:.0%}" for row in local)
    points = max(100 * (ddp["accuracy"] - row["accuracy"]) for row in local)
    return (
        f"DDP takes {ddp['seconds']:.0f} s; DeAR, which computes the same and cannot hide so much, "
        f"{dear['seconds']:.0f} s; SelSync and local SGD {seconds}, within "
        f"{max(points, 0.1):.1f} points of its accuracy, with {shares} of its bytes."
    )


def _what_local_sgd_gains(records: Sequence[Record]) -> str:
    return f"A language model reaches {_local_sgd(records)}, with DiLoCo's outer step and int4."


def _draw_demo(records: Sequence[Record], path: Path) -> None:
    [result] = records[0].results
    sys.path.insert(0, str(ROOT / "examples"))  # the examples are scripts, which import each other
    report, recording = import_module("report"), import_module("recording")
    report.draw_picture([recording.Run(**run) for run in result["runs"]], result["title"], path)


def _plans(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [result for record in records for result in record.results]


EXHIBITS: tuple[Exhibit, ...] = (
    Gains("gains", _GAINS),
    Table("demo", ("demo",), _demo),
    Sentence("demo_sentence", ("demo",), _what_the_demo_shows),
    Sentence("topics_sentence", _TOPICS, _what_local_sgd_gains),
    Picture("demo", ("demo",), _draw_demo),
    Table("plan_accuracy", _ACCURACY, lambda records: plan_accuracy_report.as_markdown(_plans(records))),
    Table("topologies_collectives", ("topologies_collectives",), collectives),
    reported("topologies_step", "topologies_step"),
    Picture(
        "plan_accuracy",
        _ACCURACY,
        lambda records, path: plan_accuracy_report.draw(_plans(records), path),
    ),
    reported("overhead", "overhead"),
    reported("overhead_adamw", "overhead_adamw"),
    reported("codecs", "codecs"),
)
