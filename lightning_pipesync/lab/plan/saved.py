"""Plans that were saved, also for other hosts and links than those that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pipesync.core.cluster import Cluster
from lightning_pipesync.core.work import Work
from lightning_pipesync.lab.netlab.units import bits_per_second


def read_plan(path: Path, hosts: int | None, rate: str | None) -> tuple[Work, Cluster, dict[str, Any]]:
    """Returns work, cluster and result of the plan in a file.

    Args:
        path: ``plan.json`` of an earlier plan.
        hosts: number of hosts, one rank each, if it is to be another one.
        rate: of their links, such as ``"25gbit"``, if it is to be another one.

    Raises:
        ValueError: the file is no plan, or there are fewer than 2 hosts.
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
    if hosts is not None:
        if hosts < 2:
            raise ValueError(f"hosts={hosts!r}: a plan needs at least 2.")
        cluster, result = cluster.with_hosts(hosts), {**result, "measured": {}}
    if rate is not None:
        cluster, result = cluster.with_bandwidth(bits_per_second(rate) / 8), {**result, "measured": {}}
    return work, cluster, result


def of_result(result: Mapping[str, Any]) -> tuple[Work, Cluster, dict[str, Any]]:
    """Returns work and cluster of a result of :func:`measure_plan`, and the result itself."""
    return Work.from_dict(result["work"]), Cluster.from_dict(result["cluster"]), dict(result)
