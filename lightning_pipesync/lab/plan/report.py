"""The plan as text, which is Markdown: a verdict, what was measured and predicted, and lines to copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cluster import Cluster
from lightning_pipesync.core.work import Work
from lightning_pipesync.lab.plan.costs import GLOO_RING_UP_TO
from lightning_pipesync.lab.plan.predictions import (
    enough_accumulation,
    enough_bandwidth,
    predict,
)
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
from lightning_pipesync.lab.plan.verdict import Verdict, ddp_of, rounds_of, verdict_of
from lightning_pipesync.methods.laboratory import Prediction
from lightning_pipesync.training.registry import METHODS

#: The two lists.
KINDS = ((True, "exact"), (False, "not exact"))

MEASURED = ["measured, in turns", "ms a step", "times DDP", "predicted", "off", "peak MiB"]
PREDICTED, EXTRAPOLATED = ([f"{how}, not run", "ms a step", "times DDP"] for how in ("predicted", "extrapolated"))


def as_markdown(work: Work, cluster: Cluster, result: Mapping[str, Any]) -> str:
    """Returns the plan: the verdict in its first line, what was measured and predicted, and lines to copy.

    No line is longer than 80 columns. The ``cluster`` may be another one than the ``result`` of :func:`measure_plan`
    has.
    """
    predictions = sorted(predict(work, cluster), key=lambda one: one.seconds)
    measured: Mapping[str, Mapping[str, Any]] = result["measured"]
    verdict = verdict_of(predictions, measured, work.seconds_with("ddp"), extrapolated(cluster, result))
    blocks = [
        paragraph("\n".join(verdict.sentences)),
        paragraph(_what_is_planned(work, cluster, result)),
        "".join(paragraph(one, bullet=True) for one in (*result["findings"], *result["changes"])),
        *_tables(predictions, work, measured, EXTRAPOLATED if extrapolated(cluster, result) else PREDICTED),
        paragraph(_enough(work, cluster)),
        paragraph(_assumptions(cluster, result)),
        paragraph(_codecs(result["codecs"])),
        *to_copy(verdict, bool(measured)),
    ]
    return "\n".join(block for block in blocks if block)


def _what_is_planned(work: Work, cluster: Cluster, result: Mapping[str, Any]) -> str:
    size = sum(tensor.num_bytes for tensor in work.profile.tensors) / MIB
    return (
        f"{result['settings']['model']} on {cluster.world_size} hosts with {rate(cluster.bandwidth)} each: a step "
        f"without communication {milliseconds(work.seconds)}, gradients {size:.3g} MiB."
    )


def extrapolated(cluster: Cluster, result: Mapping[str, Any]) -> bool:
    """Returns whether a plan is for another cluster than the one that was measured."""
    at = (result["world_size"], result["cluster"]["bandwidth"])
    return (cluster.world_size, cluster.bandwidth) != at


def _assumptions(cluster: Cluster, result: Mapping[str, Any]) -> str:
    """Returns what is assumed of a cluster that was not measured."""
    if not extrapolated(cluster, result):
        return ""
    return (
        f"Extrapolated from {result['world_size']} hosts with {rate(result['cluster']['bandwidth'])} each. Assumed: "
        "all hosts are like those, behind switches that are not too narrow; a message has the latency, and a byte the "
        "work of processors, that were measured; DDP's all-reduce is the faster of a ring and of halving and doubling, "
        f"about what NCCL's trees take (with Gloo on {GLOO_RING_UP_TO} hosts or fewer, a ring, as torch has it)."
    )


def _tables(
    predictions: Sequence[Prediction],
    work: Work,
    measured: Mapping[str, Mapping[str, Any]],
    not_run: Sequence[str],
) -> Iterator[str]:
    """Yields what was run, what was not, and what cannot be; measured and predicted steps are never in one ranking.

    The headings of what was ``not_run`` say whether it is of the measured cluster.
    """
    predicted_ddp = next(one for one in predictions if one.method == "ddp")  # the fastest
    rounds = rounds_of(predictions, measured) if measured else {}
    ddp = ddp_of(predictions, rounds)
    usual = {name: median(seconds) for name, seconds in rounds.items()}
    run = sorted((one for one in predictions if one.name in usual), key=lambda one: usual[one.name])
    failed = {one.name for one in predictions if "error" in measured.get(one.name, {})}
    rest = [one for one in predictions if one.name not in usual and one.name not in failed]

    def measured_row(one: Prediction) -> Row:
        times = f"{usual[ddp.name] / usual[one.name]:.2f}" if ddp is not None else ""
        peak = (measured[one.name]["resident_bytes"] + work.activation_bytes) / MIB
        off = f"{one.seconds / usual[one.name] - 1:+.0%}"
        cells = [one.method, number_of_ms(usual[one.name]), times, _predicted(one), off, f"{peak:.0f}"]
        return Row(cells, [one.shown_settings, one.why])

    def predicted_row(one: Prediction) -> Row:
        return Row(
            [one.method, _predicted(one), f"{predicted_ddp.seconds / one.seconds:.2f}"], [one.shown_settings, one.why]
        )

    for headings, found, make in ((MEASURED, run, measured_row), (not_run, rest, predicted_row)):
        listed: list[str | Row] = []
        for exact, title in KINDS:
            if some := [make(one) for one in found if one.exact == exact]:
                listed += [title, *some]
        yield table(headings, listed)
    yield _cannot_be_used({**work.refused, **{name: measured[name]["error"] for name in failed}})


def _cannot_be_used(reasons: Mapping[str, str]) -> str:
    """Returns why methods cannot be used, by name; those with the same reason once, with the settings of all."""
    settings: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        method, _, listed = name.partition(":")
        known = settings.get((method, reason))
        settings[method, reason] = [one for one in listed.split(",") if known is None or one in known]
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
    """Returns from where on DDP waits for 5 % of a step at most, by prediction."""
    bandwidth, batches = enough_bandwidth(work, cluster), enough_accumulation(work, cluster)
    if batches == 1:
        return "Predicted: DDP waits for the network for 5 % of a step at most here."
    ways = [f"from about {round_rate(bandwidth)}"] if bandwidth is not None else []
    ways += [f"with {batches} accumulated batches"] if batches is not None else []
    if not ways:
        return "Predicted: DDP waits for more than 5 % of a step at any bandwidth."
    return f"Predicted: DDP is enough {', or '.join(ways)}; it then waits for 5 % of a step at most."


def to_copy(verdict: Verdict, run: bool) -> Iterator[str]:
    """Yields lines of Python, and YAML, for what is advised."""
    for one, why in ((verdict.exact, ""), (verdict.other, ", if its quality suffices (docs/results.md)")):
        if one is not None:
            yield paragraph(f"{'To use' if run else 'To try'} {one.method}{why}:")
            yield _in_python(one)
            yield _in_yaml(one)


def _in_python(one: Prediction) -> str:
    """Returns the lines of Python, with the import."""
    package, strategy, settings = "lightning.pytorch.strategies", "DDPStrategy", dict(one.settings)
    if one.method == "ddp":
        settings = {"bucket_cap_mb": one.settings["bucket_mb"]}
    else:
        package, strategy = "lightning_pipesync", f"{METHODS[one.method].__name__}Strategy"
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f"{INDENT}from {package} import {strategy}\n" + code(f"Trainer(strategy={strategy}(", arguments, "))")


def _in_yaml(one: Prediction) -> str:
    """Returns the section for `pipesync launch`, of a method of this package."""
    if one.method == "ddp":
        return ""
    lines = ["pipesync:", f"  method: {one.method}", *(f"  {name}: {value}" for name, value in one.settings.items())]
    return paragraph("Or for `pipesync launch`:") + "\n" + "".join(f"{INDENT}{line}\n" for line in lines)
