"""Plans that were saved, and plans for other hosts and links than those that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args, get_type_hints

from lightning_pipesync.lab.netlab.units import bits_per_second, parse_delay
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.work import Work


@dataclass(frozen=True)
class Elsewhere:
    """For which hosts and links a plan is, where they are not those that were measured.

    ``latency`` is one way, from a host to another one.
    """

    hosts: int | None = None
    rate: str | None = None
    latency: str | None = None


def read_plan(path: Path, elsewhere: Elsewhere | None = None) -> tuple[Work, Cluster, dict[str, Any]]:
    """Returns work, cluster and result of the plan in a ``plan.json``, for other hosts or links if given.

    If the saved plan is of other hosts than were measured, the result is for those; what is given replaces them all.
    The result's ``planned_for`` and ``predictions`` are those of the cluster that is returned.

    Raises:
        ValueError: the file is not a plan, or there are fewer than 2 hosts, or the latency is malformed, or was not
            measured.
    """
    try:
        saved = json.loads(path.read_text())
        if saved["kind"] != "plan":
            raise ValueError(f"it is of kind {saved['kind']!r}")
        work, cluster, result = of_result(saved["results"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is not the plan.json of an earlier plan of this version: {type(error).__name__}: {error}. Make "
            "one with pipesync plan --output FOLDER."
        ) from error
    if elsewhere in (None, Elsewhere()):
        elsewhere = Elsewhere(**result.get("planned_for", {}))
    if elsewhere == Elsewhere():
        return work, cluster, result
    if (hosts := elsewhere.hosts) is not None:
        if hosts < 2:
            raise ValueError(f"hosts={hosts!r}: a plan needs at least 2.")
        cluster = cluster.with_hosts(hosts)
    if elsewhere.rate is not None:
        cluster = cluster.with_bandwidth(bits_per_second(elsewhere.rate) / 8)
    if (latency := elsewhere.latency) is not None:
        seconds, measured = parse_delay("latency", latency), latency_of(result)
        if measured is None:
            raise ValueError(
                f"latency={latency!r}: {path} does not have the latency of its links, which is not measured of "
                "replicas in shards. Leave it out."
            )
        cluster = cluster.with_latency(seconds, measured)
    predictions = [asdict(one) for one in predict(work, cluster)]
    result |= {"planned_for": asdict(elsewhere), "predictions": predictions, "measured": {}}
    return work, cluster, result


def latency_of(result: Mapping[str, Any]) -> float | None:
    """Returns the median seconds of one way between two hosts that were measured; None: they were not."""
    if (links := result.get("links")) is None:
        return None
    rows = links["latency"]
    return median(rows[a][b] for a in range(len(rows)) for b in range(len(rows)) if a != b)


def of_result(result: Mapping[str, Any]) -> tuple[Work, Cluster, dict[str, Any]]:
    """Returns work and cluster of a result of :func:`measure_plan`, and the result itself."""
    return _rebuilt(Work, result["work"]), _rebuilt(Cluster, result["cluster"]), dict(result)


def _rebuilt(kind: Any, saved: Any) -> Any:
    """Returns the object of a type, as a field annotates it, of which ``dataclasses.asdict`` has made ``saved``."""
    inner = get_args(kind)  # of Mapping[str, X], Sequence[X], or X | None
    if saved is not None and type(None) in inner:
        return _rebuilt(inner[0], saved)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: _rebuilt(types[name], value) for name, value in saved.items()})  # type: ignore[operator]
    if isinstance(saved, Mapping):
        return {name: _rebuilt(inner[1], value) for name, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return [_rebuilt(inner[0], value) for value in saved]
    return saved
