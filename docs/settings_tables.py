"""Writes the tables of each method's settings and metrics, from their declarations, into the method's page.

Usage: python docs/settings_tables.py
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.strategies import docs_of

DOCS = Path(__file__).parent
#: What a table on a page begins and ends with, by what is in it.
MARKS = {
    what: (f"<!-- {what}: written by docs/settings_tables.py -->", f"<!-- end of {what} -->")
    for what in ("settings", "metrics")
}


def table_of_settings(method: str) -> str:
    config_type = METHODS[method].config_type
    docs = docs_of(config_type)
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {docs[field.name].replace('``', '`').replace('|', chr(92) + '|')} |"
        for field in fields(config_type)
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def table_of_metrics(method: str) -> str:
    kind = METHODS[method]
    shown = {name: f"`{short}`" for name, short in kind.shown_metrics.items()}
    rows = [
        f"| `{method}/{name}` | {info.meaning} | {info.unit} | {info.over_ranks} | {shown.get(name, '')} |"
        for name, info in kind.metric_infos.items()
    ]
    return "\n".join(["| metric | meaning | unit | over ranks | progress bar |", "|---|---|---|---|---|", *rows])


def page_with_tables(method: str) -> str:
    """Returns the page of a method with up-to-date tables."""
    page = (DOCS / f"{method}.md").read_text()
    page = _with_table(page, "settings", table_of_settings(method))
    return _with_table(page, "metrics", table_of_metrics(method))


def _with_table(page: str, what: str, table: str) -> str:
    begin, end = MARKS[what]
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{table}\n\n{end}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for name in METHODS:
        (DOCS / f"{name}.md").write_text(page_with_tables(name))
