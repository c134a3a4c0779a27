"""Text of 80 columns that is Markdown, too: paragraphs, indented tables and code, and readable times and rates."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

#: The columns of a narrow terminal, and of most logs.
WIDTH = 80

#: The digits of a round number: 2 Tbit/s rather than 2.18.
ROUND_DIGITS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10)

#: What Markdown shows as it is.
INDENT = "    "


@dataclass(frozen=True)
class Row:
    """A row of a table: a text for each column, the first aligned left, and the ``details`` below."""

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
    """Returns a call in one line if it fits, else with its arguments in separate lines."""
    joined = f"{INDENT}{begin}{arguments}{end}\n"
    if len(joined) <= WIDTH:
        return joined
    return f"{INDENT}{begin}\n{_wrapped(arguments, 2 * INDENT, 2 * INDENT)}{INDENT}{end}\n"


def milliseconds(seconds: float) -> str:
    """Returns a time in ms, such as ``383 ms``, ``24 ms``, ``4.2 ms`` or ``0.35 ms``."""
    return f"{number_of_ms(seconds)} ms"


def number_of_ms(seconds: float) -> str:
    """Returns a time as a number of ms, with two digits or more."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def rate(bytes_per_second: float) -> str:
    """Returns a rate in Mbit/s, Gbit/s or Tbit/s, with three digits at most."""
    bits = 8 * bytes_per_second
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
        if bits >= 0.9995 * unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e6:.3g} Mbit/s"


def round_rate(bytes_per_second: float) -> str:
    """Returns a rate as a round number, as a threshold is told."""
    bits = 8 * bytes_per_second
    power = 10.0 ** math.floor(math.log10(bits))
    nearest = min(ROUND_DIGITS, key=lambda digits: abs(math.log(digits * power / bits)))
    return rate(nearest * power / 8)


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
