"""Writes the table of each method's settings, from its dataclass, into the method's page.

Usage: python docs/settings_tables.py
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path

from lightning_pipesync.methods.settings import Settings
from lightning_pipesync.training.registry import METHODS

DOCS = Path(__file__).parent
BEGIN, END = "<!-- settings: written by docs/settings_tables.py -->", "<!-- end of settings -->"


def docs_of(config_type: type[Settings]) -> dict[str, str]:
    """Returns the docstring of each field, as one paragraph, by the field's name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs


def table(method: str) -> str:
    """Returns the table of a method's settings."""
    config_type = METHODS[method].config_type
    docs = docs_of(config_type)
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {docs[field.name].replace('``', '`').replace('|', chr(92) + '|')} |"
        for field in fields(config_type)
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def page_with_table(method: str) -> str:
    """Returns the page of a method with an up-to-date table."""
    page = (DOCS / f"{method}.md").read_text()
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{table(method)}\n\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for name in METHODS:
        (DOCS / f"{name}.md").write_text(page_with_table(name))
