"""The docs say what is so: tables are what the code states; settings, files and public names exist, and are shown."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from importlib import import_module
from inspect import getsource
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from types import ModuleType

import pytest

import lightning_pipesync
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.strategies import docs_of
from tests.support.commands import ROOT
from tests.support.docs_pages import DOCS, LINKING_PAGES, PAGES, prose_of
from tests.support.own_methods import OWN

PACKAGE = ROOT / "lightning_pipesync"
#: What the classes with a method's settings are called after it.
KINDS = ("", "Config", "Strategy", "FabricStrategy")
#: Arguments of those classes that are no settings.
ARGUMENTS = {
    *("backend", "replicas", "virtual_stages", "device", "others"),
    *("process_group_backend", "start_method", "ranks_per_replica", "tensor_parallel_size", "parallelize_fn"),
}
#: What each method's page has in this order, besides sections of its own.
SECTIONS = ["The idea", "When to use it", "Settings", "What it costs", "In your code", "What is supported", "Metrics"]
API_PAGES = sorted((DOCS / "api").glob("*.md"))


@pytest.mark.parametrize("name", OWN)
def test_the_page_of_a_method_has_its_metrics_and_settings_as_they_are_and_all_sections(name: str) -> None:
    script = runpy.run_path(str(DOCS / "metrics_tables.py"))
    page = (DOCS / f"{name}.md").read_text()
    assert script["BEGIN"] in page
    assert page == script["page_with_table"](name), "run python docs/metrics_tables.py"
    config_type = METHODS[name].config_type
    assert set(docs_of(config_type)) == {field.name for field in fields(config_type)}
    [table] = re.findall(r"\n\| setting \| default \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", page)
    defaults = {field.name: repr(field.default).replace("'", '"') for field in fields(config_type)}
    for setting, default in re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.MULTILINE):
        assert defaults[setting] == default
    headings = re.findall(r"^## (.*)$", prose_of(DOCS / f"{name}.md"), re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS


def test_settings_in_a_page_exist() -> None:
    """Those of the strategies and methods that snippets and the text make."""
    types = {f"{method.__name__}{kind}": method.config_type for method in METHODS.values() for kind in KINDS}
    call = rf"(?<!Accelerate's `)\b(?:Ray)?({'|'.join(types)})\(([^()]*(?:\([^()]*\)[^()]*)*)\)"
    for page in PAGES:
        for name, given in re.findall(call, page.read_text()):
            for setting in re.findall(r"\b(\w+)=(?!=)", re.sub(r"\([^()]*\)", "", given)):
                assert setting in {*types[name].__dataclass_fields__, *ARGUMENTS}, f"{page.name}: {name}({given})"


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_and_headings_that_a_page_links_to_exist() -> None:
    for page in LINKING_PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", prose_of(page)):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


def test_files_that_a_page_names_exist() -> None:
    """Of the architecture all, elsewhere the tests and their folders."""
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+/\w+\.py)`", (DOCS / "architecture.md").read_text())
    assert named
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT, PACKAGE, PACKAGE / "methods")), name
    for page in LINKING_PAGES:
        for name in re.findall(r"\btests(?:/\w+)+(?:\.\w+)?", page.read_text()):
            path = ROOT / name
            assert path.exists() or path.with_suffix(".py").exists(), f"{page.name}: {name}"


def public_names(module: ModuleType) -> list[str]:
    """What a package exports; the classes that its file defines, if it does not say."""
    return getattr(module, "__all__", None) or re.findall(r"^class ([A-Za-z]\w*)", getsource(module), re.MULTILINE)


def test_the_api_pages_list_all_that_a_package_exports() -> None:
    """But ``lightning_pipesync.ray``, whose classes docs/ray.md has: it can be imported only where Ray is installed."""
    text = "".join(page.read_text() for page in API_PAGES)
    names = re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)$", text, re.MULTILINE)
    listed = [(name.rpartition(".")[2], id(resolve_name(name))) for name in names]
    assert len(listed) == len(set(listed)) > 50
    found = [one.name for one in walk_packages(lightning_pipesync.__path__, "lightning_pipesync.") if one.ispkg]
    for package in ["lightning_pipesync", *found]:
        if package.endswith((".ray", ".kernels")):  # where there is no Triton, no kernel is imported
            continue
        module = import_module(package)
        for name in public_names(module):
            assert (name, id(getattr(module, name))) in listed, f"add {package}.{name} to docs/api"
