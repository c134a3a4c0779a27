"""What the docs show of measurements: tables, pictures, and the claims of a paper."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results.job import ROOT, Record, path_of
from lightning_pipesync.lab.bench.tables import table

PICTURES = ROOT / "docs" / "pictures"

#: The key of a PNG file's text with the digest of the measurements that it shows.
DIGEST_KEY = "Measured"

#: What the docs have in place of a table.
NOT_MEASURED = "Not measured yet"


@dataclass(frozen=True)
class Table:
    """A table, in Markdown, of what some jobs have measured, or of a model, without any job."""

    name: str
    jobs: tuple[str, ...]
    render: Callable[[Sequence[Record]], str]

    def text(self) -> str:
        """Returns the commands, the table, and where the numbers come from; or that it has not been measured."""
        if missing := not_measured(self.jobs):
            return f"*{NOT_MEASURED}: `python -m benchmarks.results measure --only {' '.join(missing)}`*"
        records = read(self.jobs)
        shown = self.render(records).strip()
        if not records:
            return shown
        commands = "".join(f"{_wrapped(record.command)}\n" for record in records)
        origins = dict.fromkeys(record.provenance for record in records)
        origin = "Measured " + ". ".join(origins) + "."
        return f"```bash\n{commands}```\n\n{shown}\n\n*{origin}*"


@dataclass(frozen=True)
class Picture:
    """A picture, ``docs/pictures/NAME.png``, of what some jobs have measured."""

    name: str
    jobs: tuple[str, ...]
    #: Writes the file.
    draw: Callable[[Sequence[Record], Path], None]

    @property
    def path(self) -> Path:
        return PICTURES / f"{self.name}.png"

    @property
    def is_drawn(self) -> bool:
        """Whether the file shows what the jobs' files have now."""
        from PIL import Image

        if not self.path.exists():
            return False
        with Image.open(self.path) as image:
            return bool(image.info.get(DIGEST_KEY) == digest_of(self.jobs))

    def write(self) -> None:
        """Draws it, with the digest of what was measured."""
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        self.draw(read(self.jobs), self.path)
        with Image.open(self.path) as image:
            pixels = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=128)
        text = PngInfo()
        text.add_text(DIGEST_KEY, digest_of(self.jobs))
        pixels.save(self.path, optimize=True, pnginfo=text)


@dataclass(frozen=True)
class Finding:
    """What was measured for a claim, in a few words, and for which of several cases the claim holds."""

    text: str
    cases: Sequence[bool]

    @property
    def holds(self) -> str:
        return "yes" if all(self.cases) else "in part" if any(self.cases) else "no"


@dataclass(frozen=True)
class Claim:
    """A figure, a table or a statement of a paper, and what is measured of it here."""

    #: Such as Table I.
    where: str
    #: What the paper reports, with its numbers.
    reported: str
    jobs: tuple[str, ...]
    find: Callable[[Sequence[Record]], Finding]


@dataclass(frozen=True)
class Claims:
    """The table of a paper's claims."""

    name: str
    claims: tuple[Claim, ...]

    @property
    def jobs(self) -> tuple[str, ...]:
        return _jobs_of(self.claims)

    def text(self) -> str:
        """Returns the table."""
        rows = []
        for claim in self.claims:
            if not_measured(claim.jobs):
                rows.append([claim.where, claim.reported, NOT_MEASURED, ""])
            else:
                found = claim.find(read(claim.jobs))
                rows.append([claim.where, claim.reported, found.text, found.holds])
        text = table(["", "the paper", "here", "holds?"], rows)
        return text.replace("---:", "---").strip()


@dataclass(frozen=True)
class Gain:
    """What a method gains, in a few words with what was measured, and what it costs."""

    #: The name of the method.
    method: str
    jobs: tuple[str, ...]
    find: Callable[[Sequence[Record]], str]
    cost: str


@dataclass(frozen=True)
class Gains:
    """The table of what the methods gain."""

    name: str
    gains: tuple[Gain, ...]

    @property
    def jobs(self) -> tuple[str, ...]:
        return _jobs_of(self.gains)

    def text(self) -> str:
        """Returns the table."""
        rows = [
            [
                f"[`{gain.method}`]({gain.method}.md)",
                NOT_MEASURED if not_measured(gain.jobs) else gain.find(read(gain.jobs)),
                gain.cost,
            ]
            for gain in self.gains
        ]
        return table(["method", "gain", "cost"], rows).replace("---:", "---").strip()


@dataclass(frozen=True)
class Sentence:
    """A sentence with what some jobs have measured."""

    name: str
    jobs: tuple[str, ...]
    render: Callable[[Sequence[Record]], str]

    def text(self) -> str:
        """Returns the sentence; nothing if it has not been measured."""
        return "" if not_measured(self.jobs) else self.render(read(self.jobs))


Shown = Table | Claims | Gains | Sentence
Exhibit = Shown | Picture


def _jobs_of(parts: Sequence[Claim | Gain]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(job for part in parts for job in part.jobs))


def read(jobs: Sequence[str]) -> list[Record]:
    """Returns what the jobs have measured; FileNotFoundError if one has never been run."""
    return [Record.read(job) for job in jobs]


def not_measured(jobs: Sequence[str]) -> list[str]:
    """Returns the jobs that have never been run."""
    return [job for job in jobs if not path_of(job).exists()]


def digest_of(jobs: Sequence[str]) -> str:
    """Returns a digest of the files of the jobs."""
    digest = hashlib.sha256()
    for job in jobs:
        digest.update(path_of(job).read_bytes())
    return digest.hexdigest()


def _wrapped(command: str, width: int = 118) -> str:
    """Returns a command in lines of at most this width, each option with its values in one if that is possible."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        words = [part] if len(part) + 4 <= width else part.split(" ")
        for word in words:
            if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
                lines.append("   ")
            lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
