"""The site shows every page, and its API pages every public name."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getsource
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from types import ModuleType
from typing import Any

import pytest

import lightning_pipesync
from tests.test_docs import DOCS, LINKING_PAGES, ROOT

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
    module, names = import_module(package), listed()
    for name in public_names(module):
        value = getattr(module, name)
        assert any(one == name and other is value for one, other in names), f"add {package}.{name} to docs/api"


def test_the_api_pages_list_each_name_once() -> None:
    values = [(name, id(value)) for name, value in listed()]
    assert len(values) == len(set(values)) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_navigation_has_the_page(page: Path) -> None:
    listings = [DOCS / "index.md", DOCS / "api" / "index.md"]
    trees = [(one.parent, re.findall(r"```\{toctree\}\n(.*?)```", one.read_text(), re.DOTALL)) for one in listings]
    entries = [(folder, line) for folder, texts in trees for text in texts for line in text.splitlines()]
    shown = {
        (folder / re.sub(r".*<(.*)>", r"\1", line)).with_suffix(".md").resolve() for folder, line in entries if line
    }
    assert page.resolve() in {*shown, DOCS / "index.md"}
