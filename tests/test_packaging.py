"""What the package imports is declared in pyproject.toml, with the bounds that the oldest constraints prove."""

from __future__ import annotations

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import lightning_pipesync
from tests.test_imports import imports_of

ROOT = Path(__file__).parents[1]


def normalized(name: str) -> str:
    """The name of a distribution, as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared(project: dict[str, Any]) -> dict[str, str]:
    """The requirements of the package and its extras, by the name of the distribution."""
    extras = project["project"]["optional-dependencies"]
    requirements = [*project["project"]["dependencies"], *(one for extra in extras.values() for one in extra)]
    return {normalized(re.split(r"[\[<>=!~; ]", one)[0]): one for one in requirements}


def test_every_import_is_declared(project: dict[str, Any]) -> None:
    known, distributions = declared(project), packages_distributions()
    imports: dict[str, Path] = {}
    for path in [*(ROOT / "lightning_pipesync").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        imports |= dict.fromkeys((name.partition(".")[0] for name in imports_of(path)), path)
    for package, path in imports.items():
        if package in {"lightning_pipesync", "benchmarks", "examples", *sys.stdlib_module_names}:
            continue
        assert any(normalized(one) in known for one in distributions[package]), f"{path} imports {package}"


def test_the_oldest_constraints_are_the_lower_bounds(project: dict[str, Any]) -> None:
    known = declared(project)
    for line in (ROOT / "constraints-oldest.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        bound = re.search(r">=([\d.]+)", known.get(normalized(name), ""))
        if version and bound:
            assert re.sub(r"(\.0)+$", "", version) == re.sub(r"(\.0)+$", "", bound[1]), line


def test_the_wheel_has_the_package_alone(project: dict[str, Any]) -> None:
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["lightning_pipesync"]}


def test_the_version_has_one_source(project: dict[str, Any]) -> None:
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [lightning_pipesync.__version__]
