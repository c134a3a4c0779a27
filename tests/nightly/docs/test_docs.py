"""The docs say what is so: tables are what the code states, settings and files exist."""

from __future__ import annotations

import re
import runpy
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_pipesync.lab.netlab.kernel import burst_bytes
from lightning_pipesync.training.registry import METHODS
from tests.support.own_methods import OWN

ROOT = Path(__file__).parents[3]
DOCS, PACKAGE = ROOT / "docs", ROOT / "lightning_pipesync"
#: What the classes with a method's settings are called after it.
KINDS = ("", "Config", "Strategy", "FabricStrategy")
#: Arguments of those classes that are no settings.
ARGUMENTS = {
    *("backend", "replicas", "virtual_stages", "device", "others"),
    *("process_group_backend", "start_method", "ranks_per_replica", "tensor_parallel_size", "parallelize_fn"),
}


@pytest.mark.parametrize("name", ["dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync"])
def test_the_tables_of_settings_and_metrics_are_up_to_date(name: str) -> None:
    script = runpy.run_path(str(DOCS / "settings_tables.py"))
    page = (DOCS / f"{name}.md").read_text()
    assert all(mark in page for marks in script["MARKS"].values() for mark in marks)
    assert page == script["page_with_tables"](name), "run python docs/settings_tables.py"


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_documented(name: str) -> None:
    config_type, docs_of = METHODS[name].config_type, runpy.run_path(str(DOCS / "settings_tables.py"))["docs_of"]
    assert set(docs_of(config_type)) == {field.name for field in fields(config_type)}


#: What each method's page has in this order, besides sections of its own.
SECTIONS = [
    "The idea",
    "When to use it",
    "Settings",
    "Logged",
    "Guarantees and limits",
    "What is supported",
    "Evidence",
]


@pytest.mark.parametrize("name", OWN)
def test_the_pages_of_methods_have_one_form(name: str) -> None:
    headings = re.findall(r"^## (.*)$", prose_of(DOCS / f"{name}.md"), re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS


PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINKING_PAGES = [*PAGES, *ROOT.glob("C*.md"), *sorted((ROOT / "integrations").glob("**/*.md"))]


def snippets_of(page: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each Python snippet."""
    text = page.read_text()
    for match in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(2)].count("\n") + 1, textwrap.dedent(match[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_in_a_page_exist(page: Path) -> None:
    """Those of the strategies and methods that snippets and the text make."""
    types = {f"{method.__name__}{kind}": method.config_type for method in METHODS.values() for kind in KINDS}
    for name, given in re.findall(
        rf"(?<!Accelerate's `)\b(?:Ray)?({'|'.join(types)})\(([^()]*(?:\([^()]*\)[^()]*)*)\)", page.read_text()
    ):
        for setting in re.findall(r"\b(\w+)=(?!=)", re.sub(r"\([^()]*\)", "", given)):
            assert setting in {*types[name].__dataclass_fields__, *ARGUMENTS}, f"{page.name}: {name}({given})"


def prose_of(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_headings_that_a_page_links_to_exist(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", prose_of(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+/\w+\.py)`", (DOCS / "architecture.md").read_text())
    assert len(named) > 30
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT, PACKAGE, PACKAGE / "methods")), name


def test_the_burst_of_emulated_links_is_as_the_docs_say() -> None:
    assert f"After a pause, {burst_bytes(1) // 1024} KiB (or 2 ms of the rate" in (DOCS / "netlab.md").read_text()
    assert burst_bytes(10**9) == 10**9 // 8 // 500
