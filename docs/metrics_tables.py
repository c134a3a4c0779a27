"""Writes the table of each method's metrics, from their declarations, into the method's page.

Usage: python docs/metrics_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_pipesync.training.registry import METHODS

DOCS = Path(__file__).parent
#: What the table on a page begins and ends with.
BEGIN, END = "<!-- metrics: written by docs/metrics_tables.py -->", "<!-- end of metrics -->"


def table_of_metrics(method: str) -> str:
    kind = METHODS[method]
    shown = {name: f"`{short}`" for name, short in kind.shown_metrics.items()}
    rows = [
        f"| `{method}/{name}` | {info.meaning} | {info.unit} | {info.over_ranks} | {shown.get(name, '')} |"
        for name, info in kind.metric_infos.items()
    ]
    return "\n".join(["| metric | meaning | unit | over ranks | progress bar |", "|---|---|---|---|---|", *rows])


def page_with_table(method: str) -> str:
    """Returns the page of a method with an up-to-date table."""
    page, table = (DOCS / f"{method}.md").read_text(), table_of_metrics(method)
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{table}\n\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for name in METHODS:
        (DOCS / f"{name}.md").write_text(page_with_table(name))
