"""Text of 80 columns that is Markdown, too: paragraphs, and tables and code that are indented."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

#: The columns of a narrow terminal, and of most logs.
WIDTH = 80

#: What Markdown shows as it is.
INDENT = "    "


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: a text for each column, of which the first is aligned left.
        details: what stands below, as long as it is.
    """

    cells: Sequence[str]
    details: Sequence[str] = ()


def paragraph(text: str, bullet: bool = False) -> str:
    """Returns a text whose lines are wrapped, one by one, as a paragraph or an item of a list."""
    first, rest = ("- ", "  ") if bullet else ("", "")
    return "".join(_wrapped(line, first, rest) for line in text.splitlines())


def table(headings: Sequence[str], rows: Sequence[str | Row]) -> str:
    """Returns a table, whose rows may have titles between them; no text if there are no rows."""
    cells = [headings, *(["  " + row.cells[0], *row.cells[1:]] for row in rows if isinstance(row, Row))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    below = INDENT + 4 * " "

    def line(texts: Sequence[str]) -> str:
        aligned = [texts[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(texts[1:], widths[1:], strict=True))]
        return INDENT + "  ".join(aligned).rstrip() + "\n"

    lines = [line(headings)] if rows else []
    for row in rows:
        if isinstance(row, str):
            lines.append(f"{INDENT}{row}:\n")
        else:
            lines.append(line(["  " + row.cells[0], *row.cells[1:]]))
            lines += [_wrapped(detail, below, below) for detail in row.details if detail]
    return "".join(lines)


def code(begin: str, arguments: str, end: str) -> str:
    """Returns a call in one line if it fits, and with its arguments in lines of their own otherwise."""
    one_line = f"{INDENT}{begin}{arguments}{end}\n"
    if len(one_line) <= WIDTH:
        return one_line
    return f"{INDENT}{begin}\n{_wrapped(arguments, 2 * INDENT, 2 * INDENT)}{INDENT}{end}\n"


def _wrapped(text: str, first: str, rest: str) -> str:
    return (
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )
