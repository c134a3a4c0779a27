"""The plan as text, which is Markdown: a verdict, what was measured and predicted, and lines to copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.lab.bench.tables import write_results
from lightning_pipesync.lab.plan.picture import draw
from lightning_pipesync.lab.plan.predictions import (
    baseline_of,
    enough_accumulation,
    enough_bandwidth,
    is_baseline,
    predict,
)
from lightning_pipesync.lab.plan.saved import latency_of
from lightning_pipesync.lab.plan.text import (
    INDENT,
    Row,
    code,
    milliseconds,
    number_of_ms,
    paragraph,
    rate,
    round_rate,
    table,
)
from lightning_pipesync.lab.plan.verdict import Verdict, fastest_baseline, rounds_of, verdict_of
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.lab.predictions.work import Work
from lightning_pipesync.training.registry import METHODS

#: The two lists.
KINDS = ((True, "exact"), (False, "not exact"))


def as_markdown(work: Work, cluster: Cluster, result: Mapping[str, Any]) -> str:
    """Returns the plan: the verdict in its first line, what was measured and predicted, and lines to copy.

    No line is longer than 80 columns. The ``cluster`` may be another one than the ``result`` of :func:`measure_plan`
    has.
    """
    predictions = sorted(predict(work, cluster), key=lambda one: one.seconds)
    measured: Mapping[str, Mapping[str, Any]] = result["measured"]
    computation, changed = work.seconds_with(baseline_of(cluster)), extrapolated(cluster, result)
    verdict = verdict_of(predictions, measured, computation, changed)
    blocks = [
        paragraph("\n".join(verdict.sentences)),
        paragraph(_what_is_planned(work, cluster, result)),
        "".join(paragraph(one, bullet=True) for one in result["findings"]),
        *_tables(predictions, work, measured, "extrapolated" if changed else "predicted"),
        paragraph(_enough(work, cluster)),
        paragraph(_assumptions(work, cluster, result, predictions)),
        paragraph(_codecs(result["codecs"])),
        *to_copy(verdict, bool(measured), cluster.ranks_per_replica),
    ]
    return "\n".join(block for block in blocks if block)


def write_plan(folder: Path, work: Work, cluster: Cluster, result: Mapping[str, Any]) -> str:
    """Writes ``plan.json``, ``plan.md`` and ``plan.png``; returns the text of the plan, and where they are."""
    text = as_markdown(work, cluster, result)
    write_results(folder, "plan", {"kind": "plan", "results": [result]}, text)
    draw(work, cluster, result, folder / "plan.png")
    return f"{text}\nIn {folder}: plan.json, plan.md, plan.png."


def _what_is_planned(work: Work, cluster: Cluster, result: Mapping[str, Any]) -> str:
    ranks, hosts, without = cluster.ranks_per_replica, f"{cluster.world_size} hosts", "without communication"
    if ranks > 1:
        hosts, without = f"{hosts} of {ranks} ranks, which share a replica,", "without communication between hosts"
    latency = "" if cluster.latency is None else f" and {milliseconds(cluster.latency)} one way"
    return (
        f"{result['settings']['model']} on {hosts} with {rate(cluster.host_bandwidth)} each{latency}: a step {without} "
        f"{milliseconds(work.seconds)}, gradients {ranks * work.num_bytes / MIB:.3g} MiB."
    )


def extrapolated(cluster: Cluster, result: Mapping[str, Any]) -> bool:
    """Returns whether a plan is for another cluster than the one that was measured."""
    at = (result["world_size"], result["cluster"]["bandwidth"])
    return (cluster.world_size, cluster.bandwidth) != at or cluster.latency is not None


def _assumptions(work: Work, cluster: Cluster, result: Mapping[str, Any], predictions: Sequence[Prediction]) -> str:
    """Returns what is assumed of a cluster that was not measured."""
    if not extrapolated(cluster, result):
        return ""
    bandwidth = cluster.ranks_per_replica * result["cluster"]["bandwidth"]
    baseline = next(one for one in predictions if is_baseline(one))  # the fastest
    message = "a message has the latency, and a byte the work of processors, that were measured"
    if cluster.latency is not None:
        message = (
            f"a message takes {milliseconds(cluster.latency)} one way, where {milliseconds(latency_of(result) or 0.0)} "
            "were measured, and waits for the one before it in a ring; messages and bytes take the work of processors "
            "that was measured; TCP's windows are large enough"
        )
    return (
        f"Extrapolated from {result['world_size']} hosts with {rate(bandwidth)} each. Assumed: "
        f"all hosts are like those, behind switches that are not too narrow; {message}; "
        f"{baseline.method.upper()}'s all-reduce is {_all_reduce_of(baseline, work, cluster)}."
    )


def _all_reduce_of(baseline: Prediction, work: Work, cluster: Cluster) -> str:
    """Returns the algorithm with which the baseline is predicted, in words."""
    backend = cluster.backend
    buckets = [baseline.settings["bucket_mb"] * MIB] if baseline.settings else work.groups
    chosen = backend.chosen(min(max(buckets), work.num_bytes), cluster.world_size)
    if chosen == "measured":
        return "the measured one"
    words = {"ring": "a ring", "tree": "a double binary tree"}[chosen]
    if cluster.world_size <= backend.ring_up_to:
        return f"{words}, as torch's Gloo always has it (on more than {backend.ring_up_to} hosts NCCL's is assumed)"
    return f"{words}, which is the faster of a ring and a double binary tree here: NCCL chooses between them"


def _tables(
    predictions: Sequence[Prediction], work: Work, measured: Mapping[str, Mapping[str, Any]], how: str
) -> Iterator[str]:
    """Yields what was run, what was not, and what cannot be; measured and predicted steps are never in one ranking.

    ``how`` says whether what was not run is of the measured cluster.
    """
    predicted_ddp = next(one for one in predictions if is_baseline(one))  # the fastest
    times = f"times {predicted_ddp.method.upper()}"
    rounds = rounds_of(predictions, measured) if measured else {}
    ddp = fastest_baseline(predictions, rounds)
    usual = {name: median(seconds) for name, seconds in rounds.items()}
    failed = {one.name: measured[one.name]["error"] for one in predictions if "error" in measured.get(one.name, {})}

    def cells_of(one: Prediction) -> list[str]:
        if one.name not in usual:
            return [one.method, _predicted(one), f"{predicted_ddp.seconds / one.seconds:.2f}"]
        seconds, peak = usual[one.name], measured[one.name]["resident_bytes"] + work.activation_bytes
        gain = f"{usual[ddp.name] / seconds:.2f}" if ddp is not None else ""
        off = f"{one.seconds / seconds - 1:+.0%}"
        return [one.method, number_of_ms(seconds), gain, _predicted(one), off, f"{peak / MIB:.0f}"]

    run = sorted((one for one in predictions if one.name in usual), key=lambda one: usual[one.name])
    rest = [one for one in predictions if one.name not in usual and one.name not in failed]
    headings_of_run = ["measured, in turns", "ms a step", times, "predicted", "off", "peak MiB"]
    for headings, found in ((headings_of_run, run), ([f"{how}, not run", "ms a step", times], rest)):
        listed: list[str | Row] = []
        for exact, title in KINDS:
            rows = [Row(cells_of(one), [one.shown_settings, one.why]) for one in found if one.exact == exact]
            listed += [title, *rows] if rows else []
        yield table(headings, listed)
    yield _cannot_be_used({**work.refused, **failed})


def _cannot_be_used(reasons: Mapping[str, str]) -> str:
    """Returns why methods cannot be used, by name; those with the same reason once, with the settings of all."""
    settings: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        method, _, listed = name.partition(":")
        known = settings.get((method, reason))
        settings[method, reason] = [one for one in listed.split(",") if one and (known is None or one in known)]
    return "".join(
        paragraph(f"{method}{' with ' if common else ''}{', '.join(common)} cannot be used: {reason}", bullet=True)
        for (method, reason), common in settings.items()
    )


def _predicted(one: Prediction) -> str:
    seconds = number_of_ms(one.seconds)
    return f"{seconds} ± {1e3 * one.error:.{len(seconds.partition('.')[2])}f}"


def _codecs(speeds: Mapping[str, float]) -> str:
    """Returns how fast the codecs are, beside which a faster network is not worth a codec."""
    listed = ", ".join(f"{codec} {speed / 1e9:.2g}" for codec, speed in speeds.items())
    return f"Codecs encode and decode so many GB/s of fp32 values: {listed}." if speeds else ""


def _enough(work: Work, cluster: Cluster) -> str:
    """Returns from where on the baseline waits for 5 % of a step at most, by prediction."""
    bandwidth, batches = enough_bandwidth(work, cluster), enough_accumulation(work, cluster)
    name = baseline_of(cluster).upper()
    if batches == 1:
        return f"Predicted: {name} waits for the network for 5 % of a step at most here."
    ways = [f"from about {round_rate(bandwidth)}"] if bandwidth is not None else []
    ways += [f"with {batches} accumulated batches"] if batches is not None else []
    if not ways:
        return f"Predicted: {name} waits for more than 5 % of a step at any bandwidth."
    return f"Predicted: {name} is enough {', or '.join(ways)}; it then waits for 5 % of a step at most."


def to_copy(verdict: Verdict, run: bool, ranks_per_replica: int = 1) -> Iterator[str]:
    """Yields lines of Python, and YAML, for what is advised; for a model in shards also of a plain loop."""
    for one, why in ((verdict.exact, ""), (verdict.other, ", if its quality suffices (docs/results.md)")):
        if one is not None:
            yield paragraph(f"{'To use' if run else 'To try'} {one.title}{why}:")
            if ranks_per_replica > 1:
                yield _between_replicas(one, ranks_per_replica)
            else:
                yield _in_python(one)
                yield _in_yaml(one)


def _in_python(one: Prediction) -> str:
    """Returns the lines of Python, with the import."""
    package, strategy, settings = "lightning.pytorch.strategies", "DDPStrategy", dict(one.settings)
    if is_baseline(one):
        settings = {"bucket_cap_mb": one.settings["bucket_mb"]}
    else:
        package, strategy = "lightning_pipesync", f"{METHODS[one.method].__name__}Strategy"
    return f"{INDENT}from {package} import {strategy}\n" + code(f"Trainer(strategy={strategy}(", _typed(settings), "))")


def _typed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _between_replicas(one: Prediction, ranks_per_replica: int) -> str:
    """Returns the lines of a plain loop, and of a Trainer, for a model that FSDP2 shards."""
    if is_baseline(one):
        return f"{INDENT}fully_shard(model, mesh=mesh)  # of two dimensions; each layer before\n"
    method = METHODS[one.method].__name__
    arguments = ", ".join(filter(None, ["model, optimizer", 'replicas=mesh["replicas"]', _typed(one.settings)]))
    return (
        f"{INDENT}from lightning_pipesync import {method}\n"
        f'{INDENT}fully_shard(model, mesh=mesh["shards"])  # each layer before\n'
        + code(f"sync = {method}(", arguments, ")")
        + paragraph("Or with a module that shards itself in `configure_model`:")
        + _in_python(replace(one, settings={"ranks_per_replica": ranks_per_replica, **one.settings}))
    )


def _in_yaml(one: Prediction) -> str:
    """Returns the section for `pipesync launch`, of a method of this package."""
    if is_baseline(one):
        return ""
    lines = ["pipesync:", f"  method: {one.method}", *(f"  {name}: {value}" for name, value in one.settings.items())]
    return paragraph("Or for `pipesync launch`:") + "\n" + "".join(f"{INDENT}{line}\n" for line in lines)
