"""The site shows every page, and its API pages every public name."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc, getsource
from itertools import zip_longest
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from types import ModuleType
from typing import Any

import pytest

import lightning_pipesync
from lightning_pipesync.methods.settings import Settings
from tests.nightly.docs.test_docs import DOCS, LINKING_PAGES, ROOT

API_PAGES = sorted((DOCS / "api").glob("*.md"))
PAGES = [*LINKING_PAGES, *API_PAGES, ROOT / "examples" / "README.md"]
#: Without ``lightning_pipesync.ray``, which can be imported only where Ray is installed; docs/ray.md has its classes.
PACKAGES = [
    "lightning_pipesync",
    *(
        one.name
        for one in walk_packages(lightning_pipesync.__path__, "lightning_pipesync.")
        if one.ispkg and one.name != "lightning_pipesync.ray"
    ),
]


def listed() -> list[tuple[str, Any]]:
    """The names that the API pages list, without those of their modules, and what they name."""
    text = "".join(page.read_text() for page in API_PAGES)
    names = re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)$", text, re.MULTILINE)
    return [(name.rpartition(".")[2], resolve_name(name)) for name in names]


def public_names(module: ModuleType) -> list[str]:
    """What a package exports; the classes that its file defines, if it does not say."""
    return getattr(module, "__all__", None) or re.findall(r"^class ([A-Za-z]\w*)", getsource(module), re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_pages_list_all_that_a_package_exports(package: str) -> None:
    if package.endswith(".kernels"):
        pytest.importorskip("triton", reason="where there is no Triton, no kernel is imported")
    module, names = import_module(package), listed()
    for name in public_names(module):
        value = getattr(module, name)
        assert any(one == name and other is value for one, other in names), f"add {package}.{name} to docs/api"


def test_the_api_pages_list_each_name_once() -> None:
    values = [(name, id(value)) for name, value in listed()]
    assert len(values) == len(set(values)) > 50


def undocumented(kind: type) -> Iterator[str]:
    """The attributes that a class is the first to declare, and that the site does not show for lack of a docstring."""
    source = textwrap.dedent(getsource(kind))
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines, inherited = source.splitlines(), {name for base in kind.__mro__[1:] for name in declared(base)}
    docs = "\n".join(cleandoc(one.__doc__ or "") for one in kind.__mro__)
    for node, after in zip_longest(definition.body, definition.body[1:]):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            commented = "#:" in lines[node.lineno - 1] or lines[node.lineno - 2].lstrip().startswith("#:")
            has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            listed_above = re.search(rf"^    (\w+, )*{name}(, \w+)*: ", docs, re.MULTILINE)
            if not (name.startswith("_") or name in inherited or commented or has_docstring or listed_above):
                yield name


def declared(kind: type) -> set[str]:
    return {*vars(kind), *vars(kind).get("__annotations__", {})}


CLASSES = [value for _, value in listed() if isinstance(value, type) and not issubclass(value, Settings)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_attributes_are_documented(kind: type) -> None:
    assert [*undocumented(kind)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_navigation_has_the_page(page: Path) -> None:
    listings = [DOCS / "index.md", DOCS / "api" / "index.md"]
    trees = [(one.parent, re.findall(r"```\{toctree\}\n(.*?)```", one.read_text(), re.DOTALL)) for one in listings]
    entries = [(folder, line) for folder, texts in trees for text in texts for line in text.splitlines()]
    shown = {
        (folder / re.sub(r".*<(.*)>", r"\1", line)).with_suffix(".md").resolve() for folder, line in entries if line
    }
    assert page.resolve() in {*shown, DOCS / "index.md"}
