"""The files that a data set has, and the errors that tell what is missing or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """The files of a data set in the folder ``--data``."""

    #: Of the data set.
    name: str
    #: Files and folders that have to be there, within the folder.
    paths: tuple[str, ...]
    #: All of them, in words.
    described: str

    def check(self, data: Path) -> None:
        """Raises ValueError if a file or a folder is missing."""
        if missing := [path for path in self.paths if not (data / path).exists()]:
            raise ValueError(f"data={str(data)!r} has no {missing[0]}. {self.expected}")

    def wrong(self, path: Path, what: str) -> ValueError:
        """Returns the error for what is wrong with a file."""
        return ValueError(f"{path} is damaged, or of another format ({what}). {self.expected}")

    @property
    def expected(self) -> str:
        """Which layout is expected, for an error message."""
        return f"The folder has to contain {self.described} ({self.name}). Nothing is downloaded."
