"""SelSync: Selective Synchronization (its Section IV)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.converge_report import rows_of
from benchmarks.results.exhibit import Claim, Claims, Exhibit, Finding
from benchmarks.results.job import Job, Record
from benchmarks.results.views import reachable, reported, span, training_picture, training_row, training_table

_CONVERGE = "python -m benchmarks.converge"
_SMOOTHING = "smoothing=0.16"


def _selsync(delta: float, *settings: str) -> str:
    """Returns SelSync as in the paper, whose smoothing factor is 0.16 with 16 workers."""
    return ",".join([f"selsync:delta={delta:g}", _SMOOTHING, *settings])


def _fedavg(participation: float, interval: float, *settings: str) -> str:
    """Returns FedAvg with the paper's C and E."""
    share = [] if participation == 1 else [f"participation={participation:g}"]
    return ",".join([f"local_sgd:period={interval:g}epoch", *share, *settings])


def _ssp(bound: int) -> str:
    return f"parameter_server:policy=ssp,staleness_bound={bound},servers=1"


#: Table I's methods, as they are called there; ``own`` are further settings of FedAvg.
def _methods(*own: str) -> dict[str, str]:
    fedavg = {
        _fedavg(share, interval, *own): f"FedAvg ({share:g}, {interval:g})"
        for share in (1, 0.5)
        for interval in (0.25, 0.125)
    }
    ssp = {_ssp(bound): f"SSP, s = {bound}" for bound in (100, 200)}
    return {"ddp": "BSP (DDP)", **fedavg, **ssp, **{_selsync(d): f"SelSync, δ = {d:g}" for d in (0.3, 0.5)}}


#: With Adam FedAvg takes steps of full length, as in the paper.
NAMES = {
    **_methods(),
    **_methods("lr_scale=1"),
    "selsync": "SelSync, default (δ = auto, outer step)",
    "ddp": "BSP (DDP)",
}
NAMES |= {
    _selsync(0.25): "SelSync, δ = 0.25",
    _selsync(0.25, "partition=defdp"): "the same, DefDP",
    _selsync(0.25, "aggregation=gradients"): "δ = 0.25, gradients",
    _selsync(0.25, "aggregation=gradients", "partition=defdp"): "the same, DefDP",
    _fedavg(1, 0.1): "FedAvg (1, 0.1)",
    _fedavg(1, 1): "FedAvg (1, 1)",
}
_SETTINGS = [
    "ddp",
    *(
        _selsync(0.25, *aggregation, *partition)
        for aggregation in ((), ("aggregation=gradients",))
        for partition in ((), ("partition=defdp",))
    ),
]
_INJECTED = {
    _selsync(delta, "partition=defdp", *injection): f"SelSync, δ = {delta:g}{shown}"
    for delta, injection, shown in (
        (0.3, (), ", no injection"),
        (0.05, ("injection=0.5:0.5",), ", (alpha, beta) = (0.5, 0.5)"),
        (0.3, ("injection=0.5:0.5",), ", (alpha, beta) = (0.5, 0.5)"),
        (0.3, ("injection=0.75:0.75",), ", (alpha, beta) = (0.75, 0.75)"),
    )
}
NAMES |= _INJECTED


def _fewer_methods(*own: str) -> list[str]:
    """Returns Table I's methods without the second value of E and of SSP's bound, for trainings that take long."""
    return [name for name, shown in _methods(*own).items() if "0.125" not in shown and "200" not in shown]


def _table1(task: str, hosts: int, methods: Sequence[str], minutes: float, seeds: str = "0 1 2") -> Job:
    command = f"{_CONVERGE} --hosts {hosts} --rate 200mbit --task {task} --seeds {seeds} --evaluations 12"
    return Job(f"selsync_table1_{task}_{hosts}", f"{command} --methods {' '.join(methods)}", minutes)


JOBS = (
    *(_table1("digits", hosts, [*_methods()], minutes) for hosts, minutes in ((4, 12), (8, 11), (16, 14))),
    *(_table1("signals", hosts, [*_methods("lr_scale=1")], minutes) for hosts, minutes in ((4, 9), (16, 12))),
    *(
        _table1("topics", hosts, [*_fewer_methods("lr_scale=1"), "selsync"], minutes, seeds="0 1")
        for hosts, minutes in ((4, 17), (8, 17))
    ),
    _table1("resnet_digits", 4, _fewer_methods(), 12, seeds="0 1"),
    _table1("words", 4, _fewer_methods(), 50, seeds="0"),
    *(
        Job(
            f"selsync_settings_{task}",
            f"{_CONVERGE} --hosts 4 --task {task} --seeds 0 1 2 3 4 --evaluations 12 --methods {' '.join(_SETTINGS)}",
            minutes,
        )
        for task, minutes in (("digits", 5), ("signals", 8))
    ),
    Job(
        "selsync_non_iid",
        "python -m benchmarks.converge --hosts 5 --labels_per_worker 2 --epochs 16 --seeds 0 1 2 3 4 --evaluations 12 "
        f"--methods ddp {_fedavg(1, 0.1)} {_fedavg(1, 1)} {' '.join(_INJECTED)}",
        8,
    ),
    Job(
        "selsync_iid",
        "python -m benchmarks.converge --hosts 5 --epochs 16 --seeds 0 1 2 3 4 --evaluations 12 "
        f"--methods ddp {_fedavg(1, 0.1)} {_fedavg(1, 1)}",
        4,
    ),
    Job("selsync_overhead", "python -m benchmarks.selsync_overhead", 1),
)

_TABLE1 = tuple(job.name for job in JOBS if "table1" in job.name)
#: Table I with 4 workers.
ON_4_HOSTS = tuple(name for name in _TABLE1 if name.endswith("_4"))
_COLUMNS = ("LSSR", "best", "better by", "final", "spread", "MiB", "seconds", "speed-up", "reached")


def _as_good(records: Sequence[Record]) -> Finding:
    """Table I: at the better of the two thresholds, in the end; as good if the 95% interval has 0, or more."""
    parts, is_level = [], []
    for record in records:
        for result in record.results:
            rows = [row for row in rows_of(reachable(result)) if row.method in (_selsync(0.3), _selsync(0.5))]
            best = max(rows, key=lambda row: row.difference)
            is_level.append(best.difference + (best.difference_interval or 0) >= 0)
            faster = f", {best.speedup:.1f} times as fast" if best.speedup else ""
            parts.append(f"{result['settings']['task']}, {result['world_size']}: {best.difference:+.2f}{faster}")
    return Finding(f"with the better δ on the test set: {'; '.join(parts)}", is_level)


def _partition(records: Sequence[Record]) -> Finding:
    gains = []
    for record in records:
        [result] = record.results
        rows = {row.method: row for row in rows_of(result)}
        for aggregation in ((), ("aggregation=gradients",)):
            seldp = rows[_selsync(0.25, *aggregation)]
            defdp = rows[_selsync(0.25, *aggregation, "partition=defdp")]
            gains.append(seldp.final - defdp.final)
    text = f"SelDP ends {span(gains, '+.2f')} points above DefDP (parameters and gradients, two tasks)"
    return Finding(text, [gain > 0 for gain in gains])


def _aggregation(records: Sequence[Record]) -> Finding:
    """Fig. 10: with a schedule, and at a fixed rate, as that of AlexNet in the paper."""
    found = []
    for record in records:
        [result] = record.results
        rows = {row.method: row for row in rows_of(result)}
        parameters, gradients = rows[_selsync(0.25)], rows[_selsync(0.25, "aggregation=gradients")]
        found.append(parameters.final - gradients.final)
    scheduled, fixed = found
    text = f"parameters end {scheduled:.1f} points above gradients (digits), {fixed:.1f} at a fixed rate (signals)"
    return Finding(text, [scheduled > 0, abs(fixed) < 1])


def _injection(records: Sequence[Record]) -> Finding:
    [record] = records
    rows = [training_row(record, method) for method in _INJECTED]
    none, *injected = (row.final for row in rows)
    text = f"{', '.join(f'{final:.1f}' for final in injected[::-1])}%, in this order; without injection {none:.1f}%"
    better = fmean(injected) > none
    ordered = injected == sorted(injected)
    return Finding(text, [better, ordered])


def _skewed(records: Sequence[Record]) -> Finding:
    skewed, even = records
    parts, losses = [], []
    for interval in (0.1, 1):
        with_skew, without = (training_row(record, _fedavg(1, interval)).final for record in (skewed, even))
        losses.append(without - with_skew)
        parts.append(f"E = {interval:g}: {without:.1f}% to {with_skew:.1f}%")
    return Finding("; ".join(parts), [loss > 1 for loss in losses])


def _overhead(records: Sequence[Record]) -> Finding:
    [result] = records[0].results
    micro = [1e6 * row["seconds"] for row in result["windows"]]
    first = [1e3 * row["first_s"] for row in result["orders"] if row["kind"] == "SelDP"]
    tracker = f"smoothing takes {span(micro, '.1f')} microseconds a step for windows of 25 to 200"
    return Finding(f"{tracker}; SelDP {span(first, '.1f')} ms, once", [max(micro) < 2300])


EXHIBITS: tuple[Exhibit, ...] = (
    reported("selsync_overhead", "selsync_overhead"),
    training_table("selsync_table1", _TABLE1, _COLUMNS, NAMES),
    training_picture("selsync_table1", "selsync_table1_digits_4"),
    training_table("selsync_settings", ("selsync_settings_digits", "selsync_settings_signals"), _COLUMNS[:5], NAMES),
    training_picture("selsync_settings", "selsync_settings_digits"),
    training_table("selsync_non_iid", ("selsync_non_iid", "selsync_iid"), _COLUMNS[:6], NAMES),
    training_picture("selsync_non_iid", "selsync_non_iid"),
    Claims(
        "selsync_claims",
        (
            Claim(
                "Table I",
                "16 workers: 0.06 to 1.57 points above BSP (perplexity 0.05 to 0.11 below), 1.67 to 13.75 times as "
                "fast, at an LSSR of 0.73 to 0.97",
                _TABLE1,
                _as_good,
            ),
            Claim(
                "Fig. 8",
                "2.3 to 17 ms a step for a window of 25, 53 to 178% more for 200; SelDP a few seconds, once",
                ("selsync_overhead",),
                _overhead,
            ),
            Claim(
                "Fig. 9",
                "SelDP ends 0.8, 26.8 and 19.9 points above DefDP, 2.3 below its perplexity",
                ("selsync_settings_digits", "selsync_settings_signals"),
                _partition,
            ),
            Claim(
                "Fig. 10",
                "averaging parameters ends 1.7 and 0.6 points above averaging gradients; level at a fixed rate",
                ("selsync_settings_digits", "selsync_settings_signals"),
                _aggregation,
            ),
            Claim(
                "Fig. 1b",
                "FedAvg on non-IID data saturates at 60 to 70%",
                ("selsync_non_iid", "selsync_iid"),
                _skewed,
            ),
            Claim(
                "Fig. 12",
                "injection helps; (alpha, beta, δ) = (0.75, 0.75, 0.3) is best, then (0.5, 0.5, 0.3), then "
                "(0.5, 0.5, 0.05)",
                ("selsync_non_iid",),
                _injection,
            ),
        ),
    ),
)
