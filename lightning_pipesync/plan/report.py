"""The plan as a table, with lines to copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lightning_pipesync.bench.results import table
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.links import mbit
from lightning_pipesync.plan.predictions import (
    Prediction,
    enough_accumulation,
    enough_bandwidth,
    predict,
)
from lightning_pipesync.plan.work import Work
from lightning_pipesync.training.registry import METHODS

#: An exact method that gains less than this share of a step over DDP is not worth a change.
WORTH = 0.02

#: The two lists.
KINDS = ((True, "exact"), (False, "not exact"))


def as_markdown(work: Work, cluster: Cluster, result: Mapping[str, Any]) -> str:
    """Returns the plan: what was measured, the methods by predicted time, and lines to copy.

    Args:
        work: a step without communication.
        cluster: the costs of communication.
        result: of :func:`measure_plan`: ``findings``, ``codecs``, and ``measured`` steps, of which there may be none;
            and the ``changes`` since an earlier plan.
    """
    predictions = sorted(predict(work, cluster), key=lambda one: one.seconds)
    ddp = _ddp(predictions)
    measured: Mapping[str, Mapping[str, Any]] = result["measured"]
    size = sum(tensor.num_bytes for tensor in work.profile.tensors) / MIB
    lines = [
        f"{cluster.world_size} hosts, {mbit(cluster.bandwidth)}; a step without communication "
        f"{1e3 * work.seconds:.0f} ms, gradients {size:.1f} MiB\n\n",
        *(f"- {finding}\n" for finding in result["findings"]),
        *(f"- {change}\n" for change in result["changes"]),
        _codecs(result["codecs"]),
        *(
            _table(title, [one for one in predictions if one.exact == exact], ddp, work, measured)
            for exact, title in KINDS
        ),
        "\n",
        _enough(work, cluster),
        "\n\n",
        _to_copy(as_known(predictions, measured)),
    ]
    return "".join(lines)


def best_exact(predictions: Sequence[Prediction]) -> Prediction:
    """Returns the fastest exact method, and DDP if that gains too little."""
    ddp = _ddp(predictions)
    best = min((one for one in predictions if one.exact), key=lambda one: one.seconds)
    return best if best.seconds < (1 - WORTH) * ddp.seconds else ddp


def _ddp(predictions: Sequence[Prediction]) -> Prediction:
    return next(one for one in predictions if one.method == "ddp")


def recommended(predictions: Sequence[Prediction], measured: Mapping[str, Mapping[str, Any]]) -> Prediction:
    """Returns the exact method that the plan recommends.

    Args:
        predictions: of all methods.
        measured: the outcomes of those that were run, by name; if there are none, predictions count.
    """
    return best_exact(as_known(predictions, measured))


def as_known(predictions: Sequence[Prediction], measured: Mapping[str, Mapping[str, Any]]) -> list[Prediction]:
    """Returns the predictions with the seconds that were measured, if any were."""
    return [replace(one, seconds=_known(one, measured)) for one in predictions]


def _known(one: Prediction, measured: Mapping[str, Mapping[str, Any]]) -> float:
    """Returns the seconds of a step as measured, infinite if they were not; or as predicted, if none were measured."""
    if not measured:
        return one.seconds
    outcome = measured.get(one.name, {})
    return median(outcome["seconds"]) if "seconds" in outcome else math.inf


def _table(
    title: str,
    predictions: Sequence[Prediction],
    ddp: Prediction,
    work: Work,
    measured: Mapping[str, Mapping[str, Any]],
) -> str:
    headings = [title, "ms a step", "measured", "error", "times DDP", "peak MiB", "why"]
    return "\n" + table(headings, [_row(one, ddp, work, measured.get(one.name, {})) for one in predictions])


def _row(one: Prediction, ddp: Prediction, work: Work, measured: Mapping[str, Any]) -> list[str]:
    seconds = median(measured["seconds"]) if "seconds" in measured else None
    return [
        one.label,
        f"{1e3 * one.seconds:.0f} ± {1e3 * one.error:.0f}",
        measured.get("error", "") if seconds is None else f"{1e3 * seconds:.0f}",
        "" if seconds is None else f"{one.seconds / seconds - 1:+.0%}",
        f"{ddp.seconds / one.seconds:.2f}",
        f"{(measured['resident_bytes'] + work.activation_bytes) / MIB:.0f}" if "resident_bytes" in measured else "",
        one.why,
    ]


def _codecs(speeds: Mapping[str, float]) -> str:
    """Returns how fast the codecs are, beside which a faster network is not worth a codec."""
    listed = ", ".join(f"{codec} {speed / 1e9:.2g}" for codec, speed in speeds.items())
    return f"\nCodecs encode and decode so many GB/s of fp32 values: {listed}.\n" if speeds else ""


def _enough(work: Work, cluster: Cluster) -> str:
    """Returns from where on DDP waits for 5 % of a step at most."""
    bandwidth, batches = enough_bandwidth(work, cluster), enough_accumulation(work, cluster)
    ways = [f"from {mbit(bandwidth)}"] if bandwidth is not None else []
    ways += [f"with accumulate_grad_batches={batches}"] if batches not in (None, 1) else []
    if batches == 1:
        return "DDP is enough: it waits for the network for 5 % of a step at most."
    return f"DDP is enough {', or '.join(ways)}." if ways else "DDP waits for more than 5 % of a step at any bandwidth."


def _to_copy(predictions: Sequence[Prediction]) -> str:
    """Returns lines of Python and YAML for the fastest exact method and for the fastest of all."""
    exact = best_exact(predictions)
    fastest = min(predictions, key=lambda one: one.seconds)
    if exact.method == "ddp":
        text = f"Exact: stay with DDP, `Trainer(strategy={_in_python(exact)})`.\n"
    else:
        text = f"Exact: `Trainer(strategy={_in_python(exact)})`\n"
    if fastest.exact or fastest.seconds > (1 - WORTH) * exact.seconds:
        return text
    return text + (
        f"\nFastest, if its quality suffices, see its page: `Trainer(strategy={_in_python(fastest)})`\n\n"
        f"For `pipesync launch`:\n\n```yaml\n{_in_yaml(fastest)}```\n"
    )


def _in_python(one: Prediction) -> str:
    if one.method == "ddp":
        return f"DDPStrategy(bucket_cap_mb={one.settings['bucket_mb']:g})"
    settings = ", ".join(f"{name}={value!r}" for name, value in one.settings.items())
    return f"{METHODS[one.method].__name__}Strategy({settings})"


def _in_yaml(one: Prediction) -> str:
    return "".join(["pipesync:\n", f"  method: {one.method}\n", *(f"  {k}: {v}\n" for k, v in one.settings.items())])
