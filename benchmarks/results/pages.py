"""The pages of the docs with what was measured between two marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.results.exhibit import Claims, Picture, Table, read
from benchmarks.results.job import ROOT, path_of

DOCS = ROOT / "docs"
END = "<!-- end of result -->"

_PLACE = re.compile(rf"<!-- result: ([\w-]+) -->\n(.*?){re.escape(END)}", re.DOTALL)
_PICTURE = re.compile(r"!\[[^\]]*\]\(pictures/([\w-]+)\.png\)")


def places_in(text: str) -> list[str]:
    """Returns the names of the tables that a page shows, in their order."""
    return [name for name, _ in _PLACE.findall(text)]


def pictures_in(text: str) -> list[str]:
    """Returns the names of the pictures that a page shows, in their order."""
    return _PICTURE.findall(text)


def without_places(text: str) -> str:
    """Returns what is written by hand."""
    return _PLACE.sub("", text)


def with_tables(text: str, tables: Mapping[str, Table | Claims]) -> str:
    """Returns a page with all its tables made anew.

    Raises:
        ValueError: a name between the marks is not that of a table.
        FileNotFoundError: a job of a table has never been run.
    """

    def made(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise ValueError(f"{match[1]!r} is not the name of a table; there are {', '.join(tables)}.")
        shown = tables[match[1]]
        return f"<!-- result: {match[1]} -->\n\n{shown.text(read(shown.jobs))}\n\n{END}"

    return _PLACE.sub(made, text)


def pages() -> list[Path]:
    """Returns the pages that show what was measured."""
    return [page for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))] if places_in(page.read_text())]


def write(tables: Mapping[str, Table | Claims], pictures: Mapping[str, Picture]) -> None:
    """Makes all tables of the pages anew, and the pictures of which the jobs have been run since."""
    for page in pages():
        text = page.read_text()
        if (made := with_tables(text, tables)) != text:
            page.write_text(made)
    for shown in pictures.values():
        if all(path_of(job).exists() for job in shown.jobs) and not shown.is_drawn:
            shown.write()
