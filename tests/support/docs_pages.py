"""The pages of the docs, and what is in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.support.commands import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINKING_PAGES = [*PAGES, *ROOT.glob("C*.md"), *sorted((ROOT / "integrations").glob("**/*.md"))]


def blocks_of(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each block of code in a language."""
    text = page.read_text()
    for match in re.finditer(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(2)].count("\n") + 1, textwrap.dedent(match[2])


def snippets_of(page: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each Python snippet."""
    return blocks_of(page, "python")


def prose_of(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
