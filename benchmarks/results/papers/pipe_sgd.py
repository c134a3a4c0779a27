"""Pipe-SGD: a decentralized pipelined SGD framework (the poster)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import pipe_bound
from benchmarks.results.exhibit import Claim, Claims, Exhibit, Finding, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.views import (
    cost_of,
    drawn_by,
    reported,
    runs_of,
    span,
    step_row,
    training_picture,
    training_row,
    training_table,
)
from lightning_pipesync.lab.bench.tables import table

_SERVER = "parameter_server:policy=sync,servers=1"
_SERIAL = "pipe_sgd:staleness=0"
_PAPERS = "pipe_sgd:delay_compensation=none"
_CODECS = ("truncate16", "int8")

NAMES = {
    "ddp": "DDP",
    _SERVER: "parameter server, synchronous",
    _SERIAL: "all-reduce after backward",
    _PAPERS: "Pipe-SGD, without prediction (the poster's)",
    "pipe_sgd": "Pipe-SGD",
    **{f"pipe_sgd:compression={codec}": f"Pipe-SGD, {codec}" for codec in _CODECS},
    **{f"{_PAPERS},compression={codec}": f"without prediction, {codec}" for codec in _CODECS},
    **{f"pipe_sgd:staleness={k}": f"Pipe-SGD, k = {k}" for k in (2, 3)},
    f"{_PAPERS},staleness=3": "without prediction, k = 3",
    "pipe_sgd:delay_compensation=momentum": "Pipe-SGD, predicted by momentum",
}
_TIMED = ("ddp", _SERIAL, _SERVER, _PAPERS, "pipe_sgd", *(f"pipe_sgd:compression={codec}" for codec in _CODECS))
_IN_STEPS = (
    *("ddp", "pipe_sgd", *(f"pipe_sgd:compression={codec}" for codec in _CODECS)),
    *("pipe_sgd:staleness=2", _PAPERS, f"{_PAPERS},compression=int8"),
)
_IN_TEXT = ("ddp", "pipe_sgd", "pipe_sgd:compression=int8", "pipe_sgd:staleness=2", _PAPERS)
_MORE_STEPS = ("pipe_sgd:staleness=3", f"{_PAPERS},staleness=3", "pipe_sgd:delay_compensation=momentum")

_ALEXNET = "--model emulated-alexnet --scale 0.016 --ratio 0.5 1 2 4 --bucket_mb 0.5 2 --rounds 3 --steps 4"
_CANDIDATES = f"ddp {_SERIAL} pipe_sgd {_PAPERS} {' '.join(f'pipe_sgd:compression={codec}' for codec in _CODECS)}"

JOBS = (
    *(
        Job(
            f"pipe_sgd_accuracy_{hosts}",
            f"python -m benchmarks.converge --hosts {hosts} --rate 200mbit {options} --methods {' '.join(_TIMED)}",
            minutes,
        )
        for hosts, options, minutes in (
            (2, "--seeds 0 1", 9),
            (4, "--seeds 0 1 2", 14),
            (8, "--target 96 --seeds 0 1", 12),
        )
    ),
    Job(
        "pipe_sgd_steps_digits",
        "python -m benchmarks.converge --seeds 0 1 2 3 4 --evaluations 12 "
        f"--methods {' '.join([*_IN_STEPS, *_MORE_STEPS])}",
        10,
    ),
    Job(
        "pipe_sgd_steps_topics",
        f"python -m benchmarks.converge --task topics --seeds 0 1 2 --evaluations 6 --methods {' '.join(_IN_TEXT)}",
        15,
    ),
    Job(
        "pipe_sgd_ratios",
        f"pipesync bench step --hosts 2 4 --rate 200mbit {_ALEXNET} --methods {_CANDIDATES}",
        9,
    ),
    Job("pipe_sgd_timeline", "python -m benchmarks.timeline --rate 200mbit --methods ddp pipe_sgd --steps 3", 1),
    Job("pipe_bound", "python -m benchmarks.pipe_bound", 8),
    Job(
        "pipe_sgd_levels",
        "pipesync bench step --hosts 2 4 --rate 1gbit --scale 0.3 --ratio 1 2 --bucket_mb 6 --rounds 3 --steps 3 "
        f"--methods ddp {_PAPERS} {_PAPERS},pipeline_level=2",
        4,
    ),
)
_ACCURACY = tuple(f"pipe_sgd_accuracy_{hosts}" for hosts in (2, 4, 8))
_STEPS = ("pipe_sgd_steps_digits", "pipe_sgd_steps_topics")

#: As reports of steps have it.
_INT8, _PLAIN = "pipe_sgd (compression=int8)", "pipe_sgd (delay_compensation=none)"


def _ratios(records: Sequence[Record]) -> str:
    """Returns the speed relative to DDP, and the share of max(computation, communication)."""
    names = {
        "pipe_sgd (staleness=0)": "all-reduce after backward",
        _PLAIN: "the poster's",
        "pipe_sgd": "`pipe_sgd`",
        "pipe_sgd (compression=truncate16)": "truncate16",
        _INT8: "int8",
    }
    rows = []
    for hosts, run in runs_of(records):
        cells = [step_row(run, name) for name in names]
        rows.append(
            [
                f"{hosts} hosts",
                f"{cost_of(run).ratio:.2g}",
                f"{1e3 * step_row(run, 'DDP').seconds:.0f}",
                *(f"{row.over_ddp:.2f} ({row.of_limit:.0%})" for row in cells),
            ]
        )
    return table(["", "ratio", "DDP ms", *names.values()], rows)


def _levels(records: Sequence[Record]) -> str:
    names = {_PLAIN: "level 1", "pipe_sgd (delay_compensation=none, pipeline_level=2)": "level 2"}
    rows = [
        [
            f"{hosts} hosts",
            f"{cost_of(run).ratio:.2g}",
            *(f"{step_row(run, name).over_ddp:.2f} ({step_row(run, name).of_limit:.0%})" for name in names),
        ]
        for hosts, run in runs_of(records)
    ]
    return table(["", "ratio", *names.values()], rows)


def _sooner(records: Sequence[Record]) -> Finding:
    """How many times as soon as the poster's baselines a target is reached."""
    parts, over_server = [], []
    for record in records:
        hosts = record.results[0]["world_size"]
        server, serial = (training_row(record, name).seconds for name in (_SERVER, _SERIAL))
        ours = [training_row(record, name).seconds for name in ("pipe_sgd", "pipe_sgd:compression=int8")]
        if server is None or serial is None or None in ours:
            parts.append(f"{hosts} hosts: not all reach the target")
            continue
        found = [seconds for seconds in ours if seconds is not None]
        over_server += [server / seconds for seconds in found]
        against = f"{span([serial / seconds for seconds in found], '.1f')} times an all-reduce after backward"
        parts.append(
            f"{hosts} hosts: {span([server / seconds for seconds in found], '.1f')} times the server, {against}"
        )
    return Finding("; ".join(parts), [one >= 3.2 for one in over_server])


def _without_loss(records: Sequence[Record]) -> Finding:
    parts, ours, theirs = [], [], []
    for record in records:
        row, papers = training_row(record, "pipe_sgd"), training_row(record, _PAPERS)
        ours.append(row.difference + (row.difference_interval or 0) >= 0)
        theirs.append(papers.difference + (papers.difference_interval or 0) >= 0)
        task = record.results[0]["settings"]["task"]
        parts.append(f"{task}: {row.difference:+.2f} with prediction, {papers.difference:+.2f} without")
    return Finding("; ".join(parts), [*theirs, *ours])


def _delay(records: Sequence[Record]) -> Finding:
    """More delay than k = 1 hides nothing else; here, what it costs in as many steps."""
    parts, losses = [], []
    for record in records:
        one, two = training_row(record, "pipe_sgd"), training_row(record, "pipe_sgd:staleness=2")
        losses.append(one.difference - two.difference)
        task = record.results[0]["settings"]["task"]
        parts.append(f"{task}: k = 2's best is {two.difference - one.difference:+.2f} from that of k = 1")
    return Finding("; ".join(parts), [loss >= 0 for loss in losses])


def _level(records: Sequence[Record]) -> Finding:
    over = [
        step_row(run, "pipe_sgd (delay_compensation=none, pipeline_level=2)").seconds / step_row(run, _PLAIN).seconds
        for _, run in runs_of(records)
    ]
    return Finding(f"level 2 takes {span(over)} times as long", [one >= 1 for one in over])


def _linear(records: Sequence[Record]) -> Finding:
    shares = [step_row(run, _INT8).of_limit for _, run in runs_of(records) if cost_of(run).ratio < 3]
    beyond = [step_row(run, _INT8).of_limit for _, run in runs_of(records) if cost_of(run).ratio >= 3]
    over = [step_row(run, _INT8).over_ddp for _, run in runs_of(records)]
    reached = f"int8 reaches {span(shares, '.0%')} of max(computation, communication) up to a ratio of 2"
    text = f"{reached}, {span(beyond, '.0%')} at 4; {span(over)} times DDP"
    return Finding(text, [share > 0.9 for share in [*shares, *beyond]])


def _bounds(records: Sequence[Record]) -> Finding:
    """Whether every training is below the bound from its first step on."""
    parts, cases = [], []
    for problem in records[0].results[0]["problems"]:
        factors = [factor for curve in problem["curves"] for factor in pipe_bound.factors_of(curve)]
        cases.append(min(factors) >= 1)
        parts.append(f"{problem['title']}: {span(factors, '.1f')} times below")
    return Finding("; ".join(parts), cases)


_COLUMNS = ("ms a step", "steps", "seconds", "speed-up", "MiB", "best", "better by", "reached")

EXHIBITS: tuple[Exhibit, ...] = (
    training_table("pipe_sgd_accuracy", _ACCURACY, _COLUMNS, NAMES),
    training_picture("pipe_sgd_accuracy", "pipe_sgd_accuracy_4"),
    training_table("pipe_sgd_steps", _STEPS, ("best", "better by", "final"), NAMES),
    drawn_by("pipe_sgd_timeline", "pipe_sgd_timeline", "timeline.png"),
    reported("pipe_bound", "pipe_bound"),
    drawn_by("pipe_bound", "pipe_bound", "pipe_bound.png"),
    Table("pipe_sgd_ratios", ("pipe_sgd_ratios",), _ratios),
    Table("pipe_sgd_levels", ("pipe_sgd_levels",), _levels),
    Claims(
        "pipe_sgd_claims",
        (
            Claim(
                "time to accuracy",
                "3.2 to 5.4 times as fast as conventional approaches, four GPU nodes, 10 Gbit/s",
                _ACCURACY,
                _sooner,
            ),
            Claim("accuracy", "without accuracy loss", _STEPS, _without_loss),
            Claim("delay", "k = 1 is best: more hides nothing else", _STEPS, _delay),
            Claim("level", "level 1 is best: every segment costs latency", ("pipe_sgd_levels",), _level),
            Claim(
                "compression",
                "linear speed-up once compression makes computation the limit",
                ("pipe_sgd_ratios",),
                _linear,
            ),
            Claim(
                "convergence",
                "at most 8 F L √((k + 1) / T) from a convex optimum, O(log T / T) from a strongly convex one",
                ("pipe_bound",),
                _bounds,
            ),
        ),
    ),
)
