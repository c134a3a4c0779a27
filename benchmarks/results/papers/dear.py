"""DeAR: Fine-Grained All-Reduce Pipelining (its Section VI)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from statistics import fmean

from benchmarks.bucket_search import GOOD, first_good
from benchmarks.intervals import number
from benchmarks.results.exhibit import Claim, Claims, Exhibit, Finding, Picture, Table
from benchmarks.results.job import Job, Record
from benchmarks.results.views import collectives, cost_of, drawn_by, reported, runs_of, span, step_row
from lightning_pipesync.lab.bench import step as step_report
from lightning_pipesync.lab.bench.collectives import median_of, name_of
from lightning_pipesync.lab.bench.step import rows_of
from lightning_pipesync.lab.bench.tables import table

#: The networks of Table I and AlexNet, each scaled to some 4 MiB of gradients.
MODELS = {
    "resnet50": ("ResNet-50", 0.04),
    "densenet201": ("DenseNet-201", 0.05),
    "inceptionv4": ("Inception-v4", 0.023),
    "bert-base": ("BERT-Base", 0.009),
    "bert-large": ("BERT-Large", 0.003),
    "alexnet": ("AlexNet", 0.016),
}
#: Those that are measured on 2 hosts, too; the others on 4.
_HOSTS = {"resnet50": "2 4", "bert-base": "2 4"}
_FORWARD = "overlap=forward"

#: What is compared: as a command has it, as its report has it, and what it is.
SYSTEMS = {
    "ddp": ("DDP", "DDP"),
    "serial": ("all-reduce after backward", "all-reduce after backward"),
    "wfbp": ("WFBP", "WFBP, a message for each tensor"),
    "mg-wfbp": ("MG-WFBP", "MG-WFBP"),
    "horovod": ("Horovod", "Horovod-FB, 64 MiB"),
    "horovod-bo": ("Horovod, bo", "Horovod-BO"),
    "byte-scheduler": ("ByteScheduler", "ByteScheduler"),
    "dear:fusion=none,overlap=forward": (f"dear (fusion=none, {_FORWARD})", "DeAR without fusion, as in the paper"),
    "dear:fusion=none": ("dear (fusion=none)", "DeAR without fusion"),
    "dear:fusion=layers": ("dear (fusion=layers)", "DeAR-NL, 4 layers"),
    "dear:fusion=buffer,bucket_mb=0.5": ("dear (fusion=buffer, bucket_mb=0.5)", "DeAR-FB, 0.5 MiB"),
    "dear:fusion=bo,overlap=forward": (f"dear (fusion=bo, {_FORWARD})", "DeAR-BO, as in the paper"),
    "dear:fusion=bo": ("dear (fusion=bo)", "DeAR-BO"),
    "dear-rs": ("reduce-scatter only", "its reduce-scatters only"),
    "dear-ag": ("all-gather only", "its all-gathers only"),
}

#: DeAR as it is by default, and as in the paper.
DEAR, _PAPERS_DEAR = (SYSTEMS[name][0] for name in ("dear:fusion=bo", "dear:fusion=bo,overlap=forward"))
_RS, _AG = SYSTEMS["dear-rs"][0], SYSTEMS["dear-ag"][0]
_COMPARED = " ".join(SYSTEMS)
_STEP = "python -m benchmarks.step"
#: Or almost: sizes are multiples of the number of ranks.
_ONE_MIB = 2**20 - 64
#: From so many on it is tens of trials.
_TENS = 10

JOBS = (
    Job("dear_timeline", "python -m benchmarks.timeline --rate 200mbit", 1),
    Job("dear_search", "python -m benchmarks.bucket_search", 8),
    Job(
        "dear_collectives",
        "pipesync bench collectives --hosts 2 4 8 --rate 1gbit --sizes_mib 0.0625 1 4 16 --rounds 11",
        6,
    ),
    *(
        Job(
            f"dear_systems_{name.replace('-', '_')}",
            f"{_STEP} --hosts {_HOSTS.get(name, '4')} --rate 200mbit --model emulated-{name} --scale {scale} "
            f"--methods {_COMPARED} --bucket_mb 0.5 1 --ratio 1 --rounds 3 --steps 2",
            8 if name in _HOSTS else 5,
        )
        for name, (_, scale) in MODELS.items()
    ),
    *(
        Job(
            f"dear_ratios_{name.replace('-', '_')}",
            f"{_STEP} --hosts {hosts} --rate 200mbit --model emulated-{name} --scale {MODELS[name][1]} "
            "--methods ddp fsdp2 zero dear:overlap=forward dear --bucket_mb 0.5 2 --ratio 0.25 0.5 1 2 4 "
            "--rounds 3 --steps 2",
            minutes,
        )
        for name, hosts, minutes in (("resnet50", "2 4 8", 14), ("bert-base", "4", 5))
    ),
    Job(
        "dear_gigabit",
        f"{_STEP} --hosts 2 4 --rate 1gbit --model emulated-resnet50 --scale 0.3 "
        "--methods ddp fsdp2 dear:overlap=forward dear --bucket_mb 2 6 --ratio 0.5 1 2 --rounds 3 --steps 2",
        5,
    ),
)

SYSTEMS_JOBS = tuple(f"dear_systems_{name.replace('-', '_')}" for name in MODELS)


def _systems(records: Sequence[Record], hosts: int) -> str:
    """Returns ms per step and the speed relative to DDP of each system, a column for each network."""
    runs = [run for record in records for _, run in runs_of([record], hosts)]
    models = [_model_of(record) for record in records if runs_of([record], hosts)]
    rows = [
        ["ratio of communication to computation", *(f"{cost_of(run).ratio:.2f}" for run in runs)],
        ["DDP, ms per step", *(f"{1e3 * step_row(run, 'DDP').seconds:.0f}" for run in runs)],
    ]
    for name, shown in SYSTEMS.values():
        if name != "DDP":
            rows.append([shown, *(f"{step_row(run, name).over_ddp:.2f}" for run in runs)])
    for name, shown in ((_PAPERS_DEAR, "DeAR-BO, as in the paper"), (DEAR, "DeAR-BO")):
        share = [f"{step_row(run, name).of_layer_limit:.0%}" for run in runs]
        rows.append([f"{shown}, share of its limit", *share])
    return table([f"{hosts} hosts", *models], rows)


def _model_of(record: Record) -> str:
    return MODELS[record.results[0]["settings"]["model"].removeprefix("emulated-")][0]


def _both(records: Sequence[Record]) -> str:
    return "\n".join(_systems(records, hosts) for hosts in (4, 2))


def _ratios(records: Sequence[Record]) -> str:
    """Returns the speed relative to DDP, with the share of the limits, by hosts and ratio."""
    rows = []
    for name, hosts, run in ((_model_of(record), *found) for record in records for found in runs_of([record])):
        cost = cost_of(run)
        paper, eager = step_row(run, f"dear ({_FORWARD})"), step_row(run, "dear")
        found = {row.name: row for row in rows_of(run)}
        others = [number(found[n].over_ddp if n in found else None, ".2f") for n in ("FSDP2", "DDP + ZeRO-1")]
        ddp = step_row(run, "DDP")
        rows.append(
            [
                f"{name}, {hosts} hosts",
                f"{cost.ratio:.2g}",
                f"{1e3 * ddp.seconds:.0f} ({ddp.of_limit:.0%})",
                "" if ddp.prediction_error is None else f"{ddp.prediction_error:+.0%}",
                *others,
                f"{paper.over_ddp:.2f} ({paper.of_limit:.0%})",
                f"{cost.baseline / cost.two_halves:.2f}",
                f"{eager.over_ddp:.2f} ({eager.of_layer_limit:.0%})",
            ]
        )
    headings = ["", "ratio", "DDP ms (share of Eq. 8)", "predicted", "FSDP2", "DDP + ZeRO-1"]
    headings += ["the paper's schedule (share of Eq. 7)", "Eqs. 7, 8 allow", "`dear` (share of its limit)"]
    return table(headings, rows)


def _halves(records: Sequence[Record]) -> Finding:
    """Fig. 5: the two halves beside the backend's all-reduce, from 1 MiB on."""
    [record] = records
    over = []
    for one in record.results:
        if one["world_size"] > 4:
            continue  # two processors carry the messages of eight hosts
        rows = {(name_of(row), row["num_bytes"]): median_of(row) for row in one["rows"]}
        sizes = sorted({size for _, size in rows if size >= _ONE_MIB})
        over += [rows["ours: reduce_scatter + all_gather", size] / rows["gloo: all_reduce", size] for size in sizes]
    text = f"the two halves take {span(over)} times as long as Gloo's all-reduce on 2 and 4 hosts, 1 to 16 MiB"
    return Finding(text, [one < 1.1 for one in over])


def _compared_with(records: Sequence[Record], ours: str, other: str) -> list[float]:
    return [step_row(run, other).seconds / step_row(run, ours).seconds for _, run in runs_of(records)]


def _faster(records: Sequence[Record], ours: str, others: dict[str, str], least: float = 1.0) -> Finding:
    speeds = {shown: _compared_with(records, ours, other) for other, shown in others.items()}
    text = "; ".join(f"{span(found)} times {shown}" for shown, found in speeds.items())
    every = [one for found in speeds.values() for one in found]
    return Finding(text, [one >= least for one in every])


def _without_fusion(records: Sequence[Record]) -> Finding:
    """Fig. 6: DeAR without fusion, and ByteScheduler on CNNs, beside WFBP."""
    ours = SYSTEMS["dear:fusion=none,overlap=forward"][0]
    found = _faster(records, ours, {"WFBP": "WFBP with the paper's schedule"})
    cnns = [record for record in records if not _model_of(record).startswith("BERT")]
    scheduler = _compared_with(cnns, "ByteScheduler", "WFBP")
    text = f"{found.text}; ByteScheduler {span(scheduler)} times WFBP on CNNs"
    return Finding(text, [*found.cases, *(speed < 0.9 for speed in scheduler)])


def _share_of_largest(records: Sequence[Record]) -> Finding:
    """Table II: the speed-up over one host, of Eq. 6."""
    shares = []
    for hosts, run in runs_of(records):
        row, cost = step_row(run, _PAPERS_DEAR), cost_of(run)
        shares.append(hosts * row.scaling_efficiency / cost.max_speedup(hosts))
    return Finding(f"{span(shares, '.0%')}, with the paper's schedule", [share > 0.7 for share in shares])


def _breakdown(records: Sequence[Record]) -> Finding:
    exposed = {
        half: [step_row(run, name).exposed for _, run in runs_of(records)] for half, name in (("rs", _RS), ("ag", _AG))
    }
    is_less = [rs <= ag for rs, ag in zip(exposed["rs"], exposed["ag"], strict=True)]
    text = f"reduce-scatters alone leave less exposed than all-gathers alone in {sum(is_less)} of {len(is_less)} cases"
    return Finding(text, is_less)


def _searches(records: Sequence[Record]) -> Finding:
    """Fig. 10: the trials until a good size, of the networks whose first size is not good.

    The mean is that of the searches that found one; the others gave up before.
    """
    [result] = records[0].results
    searches: dict[str, list[int | None]] = {}
    lost: dict[str, list[float]] = {}
    for run in result["runs"]:
        if (number := first_good(run)) != 1:
            searches.setdefault(run["search"], []).append(number)
        lost.setdefault(run["search"], []).append(run["steps"][-1] / run["best"] - 1)
    found = {kind: [number for number in numbers if number] for kind, numbers in searches.items()}
    trials = {kind: fmean(numbers) if numbers else inf for kind, numbers in found.items()}
    shown = ", ".join(
        f"{kind} {number:.1f} ({len(found[kind])} of {len(searches[kind])} got there)"
        for kind, number in trials.items()
    )
    text = f"trials until within {GOOD:.0%} of the best: {shown}; BO ends within {max(lost['bo']):.1%} at most"
    others = trials["random"], trials["grid"]
    return Finding(text, [trials["bo"] < min(others), found["bo"] == searches["bo"], *(one >= _TENS for one in others)])


def _batch_sizes(records: Sequence[Record]) -> Finding:
    """Fig. 11: a smaller batch is a larger ratio of communication to computation."""
    speeds = [step_row(run, "dear").over_ddp for _, run in runs_of(records, 2, 4)]
    text = f"{span(speeds)} times DDP at ratios from 0.25 to 4, as batches 16 times as small have"
    return Finding(text, [speed >= 0.99 for speed in speeds])


EXHIBITS: tuple[Exhibit, ...] = (
    drawn_by("dear_timeline", "dear_timeline", "timeline.png"),
    reported("dear_search", "dear_search"),
    drawn_by("bucket_search", "dear_search", "bucket_search.png"),
    Table("dear_collectives", ("dear_collectives",), partial(collectives, least_bytes=_ONE_MIB)),
    Table("dear_systems", SYSTEMS_JOBS, _both),
    Table("dear_ratios", ("dear_ratios_resnet50", "dear_ratios_bert_base"), _ratios),
    Table("dear_gigabit", ("dear_gigabit",), _ratios),
    Picture(
        "speedup",
        ("dear_ratios_resnet50",),
        lambda records, path: step_report.draw_speedup(records[0].results, path),
    ),
    drawn_by("scaling", "dear_ratios_resnet50", "scaling.png"),
    drawn_by("breakdown", "dear_systems_resnet50", "breakdown.png"),
    Claims(
        "dear_claims",
        (
            Claim("Fig. 5", "the two halves cost what an all-reduce costs", ("dear_collectives",), _halves),
            Claim(
                "Fig. 6",
                "without fusion 6 to 19% faster than WFBP; ByteScheduler below 0.9 times WFBP on CNNs",
                SYSTEMS_JOBS,
                _without_fusion,
            ),
            Claim(
                "Fig. 7",
                "with fusion 6 to 83% (mean 36%) faster than Horovod, DDP and MG-WFBP at 10 Gbit/s; up to 15% at 100",
                SYSTEMS_JOBS,
                partial(
                    _faster, ours=DEAR, others={"Horovod": "Horovod-FB", "DDP": "DDP's best", "MG-WFBP": "MG-WFBP"}
                ),
            ),
            Claim("Table II", "72 to 99% of the largest possible speed-up", SYSTEMS_JOBS, _share_of_largest),
            Claim("Fig. 8", "less of the reduce-scatters than of the all-gathers is exposed", SYSTEMS_JOBS, _breakdown),
            Claim(
                "Fig. 9",
                "DeAR-BO 22 to 56% faster than Horovod-FB at 10 Gbit/s, 7 to 14% at 100; ahead of NL, FB, Horovod-BO; "
                "1.35 to 4.54 times no fusion",
                SYSTEMS_JOBS,
                partial(
                    _faster,
                    ours=DEAR,
                    others={
                        "Horovod, bo": "Horovod-BO",
                        "dear (fusion=layers)": "NL",
                        "dear (fusion=buffer, bucket_mb=0.5)": "FB",
                        "dear (fusion=none)": "no fusion",
                    },
                    least=0.98,
                ),
            ),
            Claim(
                "Fig. 10",
                "BO finds a stable size in several trials, random and grid search in tens",
                ("dear_search",),
                _searches,
            ),
            Claim(
                "Fig. 11",
                "ahead of all others at every batch size",
                ("dear_ratios_resnet50", "dear_ratios_bert_base"),
                _batch_sizes,
            ),
        ),
    ),
)
