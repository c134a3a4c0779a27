"""The frontier of low communication: quality over bytes, and step times over links as between cities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.converge_report import COLUMNS, Row, by_method, rows_of, step_seconds
from benchmarks.results.exhibit import Exhibit, Picture, Sentence, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.papers.local_sgd import NAMES as OF_LOCAL_SGD
from benchmarks.results.views import named, reported, steps_of, training_row
from lightning_pipesync.lab.bench.pictures import MARKERS, looks_of, picture
from lightning_pipesync.lab.bench.tables import table

_NESTEROV = "outer_optimizer=nesterov,outer_lr=1.0,outer_momentum"
_40_STEPS = f"local_sgd:period=40,{_NESTEROV}=0.5,compression=int2"
_68_STEPS = f"local_sgd:period=68,{_NESTEROV}=0.3,compression=int2"
#: Gradients compressed at every step.
_EACH_STEP = {
    "ddp": "DDP",
    "ddp_powersgd:rank=4": "DDP, torch's PowerSGD, rank 4",
    "dear:low_rank=4": "DeAR, ACP-SGD, rank 4",
    "dear:low_rank=4,low_rank_method=power_sgd": "DeAR, PowerSGD, rank 4",
    "dear:compression=fp8": "DeAR, fp8",
}
#: The same with fewer bits than fp8's.
_FEW_BITS = {
    "dear:compression=int4": "DeAR, int4",
    "dear:compression=int2": "DeAR, int2",
}
#: As they are timed: in so few steps DeAR's search for bucket sizes would not end.
_TIMED = {
    f"{name},fusion=buffer,bucket_mb=1" if name.startswith("dear:") else name: title
    for name, title in {**_EACH_STEP, **_FEW_BITS}.items()
}
#: Weights averaged in rounds.
_ROUNDS = {
    _40_STEPS: "local SGD, period=40, Nesterov 0.5, int2",
    _68_STEPS: "local SGD, period=68, Nesterov 0.3, int2",
    "sparseloco:period=15": "SparseLoCo, period=15",
    "sparseloco": "SparseLoCo, period=30",
}
#: Of the task whose optimizer is Muon, beside DDP.
_WITH_MUON = {
    "muloco": "MuLoCo, period=30",
    "muloco:period=68": "MuLoCo, period=68",
}
_STREAMED = f"{_40_STEPS},fragments=4,overlap_steps=4"
_OVERLAPPED = "sparseloco:overlap_steps=4"
_FAR = {
    "ddp": "DDP",
    **_ROUNDS,
    _STREAMED: "local SGD, period=40, int2, 4 fragments, overlap_steps=4",
    _OVERLAPPED: "SparseLoCo, period=30, overlap_steps=4",
}
#: As the tables have them.
_NAMES = OF_LOCAL_SGD | _EACH_STEP | _FEW_BITS | _TIMED | _FAR | _WITH_MUON
_CONVERGE = "python -m benchmarks.converge --hosts"
_FRONT = " ".join([*_EACH_STEP, *_ROUNDS])
_WAN = "--rate 20mbit --delay 40ms"
#: Maximum number of panels side by side.
_IN_A_ROW = 3

JOBS = (
    Job(
        "low_communication_topics",
        f"{_CONVERGE} 4 --task topics --epochs 6 --evaluations 6 --seeds 0 1 2 3 4 --methods {_FRONT}",
        68,
    ),
    Job(
        "low_communication_topics_few_bits",
        f"{_CONVERGE} 4 --task topics --epochs 6 --evaluations 6 --seeds 0 1 2 --methods ddp {' '.join(_FEW_BITS)}",
        25,
    ),
    Job(
        "low_communication_topics_muon",
        f"{_CONVERGE} 4 --task topics_muon --epochs 6 --evaluations 6 --seeds 0 1 2 3 4 "
        f"--methods ddp {' '.join(_WITH_MUON)}",
        25,
    ),
    *(
        Job(
            f"low_communication_{name}",
            f"{_CONVERGE} {hosts} --task {task} --epochs {epochs} --evaluations 9 --seeds 0 1 2 --methods ddp {rounds}",
            minutes,
        )
        for name, hosts, task, epochs, rounds, minutes in (
            ("topics_long", 4, "topics", 18, f"{_40_STEPS} {_68_STEPS}", 40),
            ("topics_8_hosts", 8, "topics", 36, _68_STEPS, 50),
            ("tiny_llama", 4, "tiny_llama", 18, f"{_40_STEPS} {_68_STEPS}", 40),
        )
    ),
    Job(
        "low_communication_time",
        f"{_CONVERGE} 4 --task topics --rate 50mbit --steps 120 --evaluations 2 --seeds 0 1 2 "
        f"--methods alone {' '.join(_TIMED)}",
        15,
    ),
    Job(
        "low_communication_wan",
        f"{_CONVERGE} 4 --task topics {_WAN} --compute 200ms --steps 204 --evaluations 2 "
        f"--methods alone {' '.join(_FAR)}",
        12,
    ),
    Job(
        "low_communication_replicas",
        f"pipesync netlab --hosts 2 {_WAN} -- python -m benchmarks.replicas --period 40 --periods 3 --overlap_steps 8",
        25,
    ),
)


def _quality(records: Sequence[Record]) -> str:
    """Returns the quality of the trainings, and their bytes relative to DDP's."""
    parts = []
    for record in records:
        [result] = record.results
        sent = _mib_sent(result)
        rows = [
            [
                named(row.method, _NAMES),
                *(COLUMNS[column](row) for column in ("best", "better by", "final")),
                f"{sent[row.method]:.2f}",
                f"{sent['ddp'] / sent[row.method]:.0f}",
            ]
            for row in rows_of(result)
        ]
        headings = ["", f"best {result['metric']}", "better than DDP by", "final", "MiB", "times fewer than DDP"]
        parts += [f"**{_title(result)}**\n", table(headings, rows)]
    return "\n".join(parts)


def _long(records: Sequence[Record]) -> str:
    """Returns what the longest rounds reach in long trainings of both models, at best, beside DDP."""
    [result] = records[0].results
    sent = _mib_sent(result)
    ours, of_8_hosts, of_llama = (
        "{}, DDP {}".format(*(COLUMNS["best"](training_row(record, name)) for name in (_68_STEPS, "ddp")))
        for record in records
    )
    return (
        f"In {steps_of(result):.0f} steps, with an average every 68 and 2 bits a value, it reaches a perplexity of "
        f"{ours}, with a {sent['ddp'] / sent[_68_STEPS]:.0f}th of DDP's bytes; with 8 hosts {of_8_hosts}; a Llama of "
        f"two layers reaches {of_llama}."
    )


def _title(result: dict[str, Any]) -> str:
    """Returns which trainings these are."""
    return f"{result['settings']['task']}, {result['world_size']} hosts, {steps_of(result):.0f} steps"


def _mib_sent(result: dict[str, Any]) -> dict[str, float]:
    """Returns the MiB that rank 0 has sent in a whole training with each method, the median over the seeds."""
    return {name: median(run["points"][-1]["mib"] for run in runs) for name, runs in by_method(result).items()}


def _draw(records: Sequence[Record], path: Path) -> None:
    """Draws the quality over bytes: a point for each method with its settings, a panel for each training."""
    found: dict[str, dict[str, tuple[float, Row]]] = {}
    for record in records:
        [result] = record.results
        sent = _mib_sent(result)
        of_training = found.setdefault(_title(result), {})
        for row in rows_of(result):
            of_training.setdefault(row.method, (sent[row.method], row))  # the first record has more seeds
    names = [*dict.fromkeys(name for of_training in found.values() for name in of_training)]
    looks = _looks_of(names)
    rows = ceil(len(found) / _IN_A_ROW)
    with picture(path, (13, 3 + 4 * rows), rows, min(_IN_A_ROW, len(found)), legend="below") as panels:
        for panel in panels.flat[len(found) :]:
            panel.set_axis_off()
        for panel, (title, of_training) in zip(panels.flat, found.items(), strict=False):
            for name, (mib, row) in of_training.items():
                label = named(name, _NAMES).replace("`", "")
                panel.errorbar(
                    mib, row.best, row.best_interval, linestyle="none", capsize=3, label=label, **looks[name]
                )
            panel.set(xscale="log", xlabel="MiB sent by rank 0 in a training", ylabel="best perplexity", title=title)
            panel.grid(alpha=0.3)


def _looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the look of the point of each name: the colour of its method, and a marker of its own in that colour."""
    numbers, looks = Counter[str](), {}
    for name, look in looks_of(names).items():
        looks[name] = {"color": look["color"], "marker": MARKERS[numbers[look["color"]] % len(MARKERS)]}
        numbers[look["color"]] += 1
    return looks


def _speeds(records: Sequence[Record]) -> str:
    """Returns the time of a step, and its share of one without communication."""
    [record] = records
    [result] = record.results
    alone = step_seconds(by_method(result)["alone"])
    ddp = training_row(record, "ddp").step_seconds
    rows = [
        [
            named(row.method, _NAMES),
            f"{1e3 * row.step_seconds:.0f}",
            f"{ddp / row.step_seconds:.1f}",
            f"{alone / row.step_seconds:.0%}",
        ]
        for row in rows_of(result)
    ]
    return table(["", "ms a step", "times as fast as DDP", "of the speed without communication"], rows)


_TRAINED = (
    *("low_communication_topics", "low_communication_topics_few_bits", "low_communication_topics_long"),
    *("low_communication_topics_8_hosts", "low_communication_topics_muon", "low_communication_tiny_llama"),
)

_LONG = ("low_communication_topics_long", "low_communication_topics_8_hosts", "low_communication_tiny_llama")

EXHIBITS: tuple[Exhibit, ...] = (
    *(Table(job, (job,), _quality) for job in _TRAINED),
    Sentence("long_sentence", _LONG, _long),
    Picture("low_communication", (*_TRAINED, "topics_quality"), _draw),
    Table("low_communication_time", ("low_communication_time",), _speeds),
    Table("low_communication_wan", ("low_communication_wan",), _speeds),
    reported("low_communication_replicas", "low_communication_replicas"),
)
