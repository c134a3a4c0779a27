"""What has changed since an earlier plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from lightning_pipesync.lab.plan.units import milliseconds, rate

#: Less than this share of a value, or than what it varied by between two rounds, is no change.
NO_CHANGE = 0.05


def changes_since(path: Path, now: Mapping[str, Any]) -> list[str]:
    """Returns what is better, worse or unchanged since the plan in a file, a sentence each.

    Args:
        path: ``plan.json`` of an earlier plan; none is returned if there is none, or one of another model.
        now: the result of :func:`measure_plan`.
    """
    try:
        (before,) = json.loads(path.read_text())["results"]
        of_same = [before[name] == now[name] for name in ("settings", "world_size")]
        return [f"Since {before['made']}:", *_changes(before, now)] if all(of_same) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    rates = [result["cluster"]["bandwidth"] for result in (before, now)]
    yield f"network {rate(rates[0])}, now {rate(rates[1])}: {_verdict(1 / rates[0], 1 / rates[1])}"
    works = [
        sum(result["work"]["profile"][part] for part in ("forward", "backward", "update")) for result in (before, now)
    ]
    yield f"computation {milliseconds(works[0])}, now {milliseconds(works[1])}: {_verdict(*works)}"
    for name, measured in now["measured"].items():
        rounds = [one.get("seconds") for one in (before["measured"].get(name, {}), measured)]
        if all(rounds):
            old, new = map(median, rounds)
            varies = max(max(seconds) - min(seconds) for seconds in rounds)
            yield f"{name} {milliseconds(old)}, now {milliseconds(new)}: {_verdict(old, new, varies)}"


def _verdict(before: float, now: float, varies: float = 0.0) -> str:
    """Returns whether a cost is better, worse or unchanged; ``varies`` is the range of several measurements."""
    if abs(now - before) <= max(NO_CHANGE * before, varies):
        return "unchanged"
    return "better" if now < before else "worse"
