"""What a search for the best bucket size has found, for the next run of the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class TuningFile:
    """A JSON file: for each number of ranks and size of the model, what the search has measured.

    Args:
        path: of the file; it need not be there.

    Raises:
        ValueError: the file is there, and is not one that :meth:`write` has made.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._states: dict[str, Any] = {}
        if self._path.exists():
            try:
                self._states = dict(json.loads(self._path.read_text())["searches"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"tuning_file={str(path)!r} is not a file in which DeAR has kept a search ({error}): remove it, or "
                    "name another one."
                ) from error

    def read(self, world_size: int, model_bytes: int) -> dict[str, Any] | None:
        """Returns what was found for such a job; None if nothing was."""
        return self._states.get(f"{world_size} ranks, {model_bytes} bytes")

    def write(self, world_size: int, model_bytes: int, state: dict[str, Any]) -> None:
        """Keeps what was found for such a job, beside what was found for others."""
        self._states[f"{world_size} ranks, {model_bytes} bytes"] = state
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f"{self._path.name}.new")
        temporary.write_text(json.dumps({"searches": self._states}, indent=2))
        temporary.replace(self._path)
