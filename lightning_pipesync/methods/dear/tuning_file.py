"""The measurements of searches for the best bucket size, for the next run of the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.files import replacing


class TuningFile:
    """A JSON file with the measurements of each job's search.

    Args:
        path: of the file, which may not exist yet.

    Raises:
        ValueError: the file exists, and :meth:`write` has not written it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._searches: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            try:
                self._searches = json.loads(self._path.read_text())["searches"]
                for state in self._searches.values():
                    _check(state)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"tuning_file={str(path)!r} is not a file in which DeAR has kept a search "
                    f"({type(error).__name__}: {error}): remove it, or name another one."
                ) from error

    def read(self, job: str) -> dict[str, Any] | None:
        """Returns the measurements of a job; None if there are none."""
        return self._searches.get(job)

    def write(self, job: str, state: dict[str, Any]) -> None:
        """Writes the measurements of a job, and keeps those of other jobs.

        Raises:
            OSError: the file cannot be written.
        """
        self._searches[job] = state
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps({"searches": self._searches}, indent=2))


def _check(state: dict[str, Any]) -> None:
    """Raises if this is not the state of a :class:`FusionTuner`."""
    Fusion(*state["fusion"])
    bool(state["finished"])
    for bucket_mb, edge_mb, seconds in state["trials"]:
        Fusion(bucket_mb, edge_mb)
        float(seconds)
