"""Local SGD, from FedAvg to Streaming DiLoCo, on a language model; and replicas that come and go."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.converge_report import by_method, rows_of, step_seconds
from benchmarks.intervals import number
from benchmarks.results.exhibit import Exhibit, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.views import drawn_by, reported, training_row, training_table
from lightning_pipesync.lab.bench.tables import table

_OUTER = "outer_optimizer=nesterov,outer_lr=1.0,outer_momentum"
_STREAMED = "compression=int4,fragments=4,overlap_steps=2"
#: The one that sends least while it keeps DDP's quality.
LOCAL_SGD = f"local_sgd:period=16,{_OUTER}=0.3,{_STREAMED}"
#: The methods that are compared, as the tables have them.
NAMES = {
    "ddp": "DDP",
    "dear": "DeAR, searching",
    "dear:fusion=buffer,bucket_mb=0.5": "DeAR, 0.5 MiB",
    "pipe_sgd": "Pipe-SGD",
    "selsync:lssr=0.75,outer_momentum=0.3": "SelSync, lssr=0.75, outer_momentum=0.3",
    f"local_sgd:period=16,{_OUTER}=0.3": "local SGD, period=16, Nesterov 0.3",
    LOCAL_SGD: "local SGD, period=16, Nesterov 0.3, int4, 4 fragments, overlap_steps=2",
    f"local_sgd:period=40,{_OUTER}=0.5,compression=int4": "local SGD, period=40, Nesterov 0.5, int4",
}
_TRAINED = [name for name in NAMES if not name.startswith("dear")]  # which trains as DDP does
_TOPICS = "python -m benchmarks.converge --hosts 4 --task topics"
_RATES = (50, 200)

#: Averages after every step, or every four: with all, on a ring, and in pairs.
_GOSSIP = {
    "ddp": "DDP",
    "local_sgd:period=1": "exact averages",
    "local_sgd:neighbors=ring,period=1": "a ring",
    "local_sgd:neighbors=ring,period=1,overlap_steps=1": "a ring, in the order of D-PSGD",
    "local_sgd:neighbors=random_pairs,period=1": "random pairs",
    "local_sgd:period=4": "exact averages, period=4",
}

JOBS = (
    Job(
        "topics_quality",
        f"{_TOPICS} --epochs 6 --evaluations 24 --seeds 0 1 2 --methods {' '.join(_TRAINED)}",
        28,
    ),
    *(
        Job(
            f"topics_time_{rate}",
            f"{_TOPICS} --rate {rate}mbit --steps 96 --evaluations 6 --methods alone {' '.join(NAMES)}",
            minutes,
        )
        for rate, minutes in zip(_RATES, (6, 4), strict=True)
    ),
    Job(
        "replicas_step",
        "pipesync netlab --hosts 2 --rate 200mbit -- python -m benchmarks.replicas",
        8,
    ),
    Job("local_sgd_gossip", "python -m benchmarks.gossip", 1),
    Job(
        "gossip_training",
        "python -m benchmarks.converge --hosts 8 --task digits --epochs 25 --seeds 0 1 2 "
        f"--methods {' '.join(_GOSSIP)}",
        20,
    ),
    Job("replicas_goodput", "python -m benchmarks.goodput --duration_s 150 --heartbeat_timeout_s 2", 10),
)


def _seconds_to_target(records: Sequence[Record]) -> str:
    """Returns steps and bytes to the target, and steps times the time of a step on a slow network."""
    quality, *timed = records
    [result] = quality.results
    step = {name: [training_row(record, name).step_seconds for record in timed] for name in NAMES}
    rows = []
    for row in rows_of(result):
        found = [row.steps * seconds for seconds in step[row.method]] if row.steps else [None] * len(timed)
        rows.append(
            [
                NAMES[row.method],
                number(row.steps, ".0f"),
                f"{row.final:.2f}" + ("" if row.final_interval is None else f" ± {row.final_interval:.2f}"),
                number(row.mib, ".1f"),
                *(number(value, ".1f") for value in found),
            ]
        )
    return table(["", "steps", "final perplexity", "MiB", *(f"seconds at {rate} Mbit/s" for rate in _RATES)], rows)


def _step_times(records: Sequence[Record]) -> str:
    """Returns the time of a step of each method, also of one that does not communicate."""
    rows = []
    for name in ("ddp", *(name for name in NAMES if name != "ddp")):
        cells = []
        for record in records:
            row, ddp = training_row(record, name), training_row(record, "ddp")
            cells.append(f"{1e3 * row.step_seconds:.0f} ({ddp.step_seconds / row.step_seconds:.1f})")
        rows.append([NAMES[name], *cells])
    alone = (step_seconds(by_method(record.results[0])["alone"]) for record in records)
    rows.append(["no communication", *(f"{1e3 * seconds:.0f}" for seconds in alone)])
    return table(["", *(f"ms per step at {rate} Mbit/s (times DDP)" for rate in _RATES)], rows)


_TIMES = tuple(f"topics_time_{rate}" for rate in _RATES)

EXHIBITS: tuple[Exhibit, ...] = (
    Table("topics", ("topics_quality", *_TIMES), _seconds_to_target),
    Table("topics_steps", _TIMES, _step_times),
    reported("local_sgd_gossip", "local_sgd_gossip"),
    drawn_by("local_sgd_gossip", "local_sgd_gossip", "gossip.png"),
    training_table(
        "gossip_training", ("gossip_training",), ("steps", "best", "better by", "final", "spread", "MiB"), _GOSSIP
    ),
    reported("replicas_step", "replicas_step"),
    reported("replicas_goodput", "replicas_goodput"),
    drawn_by("replicas_goodput", "replicas_goodput", "goodput.png"),
)
