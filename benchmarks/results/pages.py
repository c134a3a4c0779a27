"""The pages of the docs with what was measured between two marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.results.exhibit import Picture, Shown, not_measured
from benchmarks.results.job import ROOT

DOCS = ROOT / "docs"
END = "<!-- end of result -->"

#: A table by its name, or a picture by its name and the text in its place.
_PLACE = re.compile(rf"<!-- (result|picture): (\w+)(?:, ([^\n]*?))? -->\n(.*?){re.escape(END)}", re.DOTALL)


def places_in(text: str) -> list[str]:
    """Returns the names of the tables that a page shows, in their order."""
    return [match[2] for match in _PLACE.finditer(text) if match[1] == "result"]


def pictures_in(text: str) -> list[str]:
    """Returns the names of the pictures that a page shows, in their order."""
    return [match[2] for match in _PLACE.finditer(text) if match[1] == "picture"]


def without_places(text: str) -> str:
    """Returns what is written by hand."""
    return _PLACE.sub("", text)


def made_anew(text: str, tables: Mapping[str, Shown], pictures: Mapping[str, Picture]) -> str:
    """Returns a page with all its tables and pictures; a picture that has not been measured is left out.

    Raises:
        ValueError: a name between the marks is not that of a table, or of a picture.
    """

    def made(match: re.Match[str]) -> str:
        kind, name, alternative = match[1], match[2], match[3]
        known = tables if kind == "result" else pictures
        if name not in known:
            raise ValueError(f"{name!r} is not the name of a {kind}; there are {', '.join(known)}.")
        if kind == "result":
            return f"<!-- result: {name} -->\n\n{tables[name].text()}\n\n{END}"
        shown = "" if not_measured(pictures[name].jobs) else f"![{alternative}](pictures/{name}.png)\n\n"
        return f"<!-- picture: {name}, {alternative} -->\n\n{shown}{END}"

    return _PLACE.sub(made, text)


def pages() -> list[Path]:
    """Returns the pages that show what was measured."""
    return [page for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))] if _PLACE.search(page.read_text())]


def write(tables: Mapping[str, Shown], pictures: Mapping[str, Picture]) -> None:
    """Makes all tables of the pages anew, and the pictures of which the jobs have been run since."""
    for page in pages():
        text = page.read_text()
        if (made := made_anew(text, tables, pictures)) != text:
            page.write_text(made)
    for shown in pictures.values():
        if not not_measured(shown.jobs) and not shown.is_drawn:
            shown.write()
