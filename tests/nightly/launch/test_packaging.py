"""What the package imports is declared in pyproject.toml, and what is built from it has all that it must have."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import lightning_pipesync
from lightning_pipesync.core.extras import MODULES, TWINS, is_installed
from tests.quick.launch.test_imports import imports_of
from tests.support.commands import ROOT, environment

#: By folder of the package, the extras that install what it imports besides the requirements of the package itself.
EXTRAS_OF = {
    "core": ("torchft",),
    "methods": ("tune", "torchft"),
    "fabric": ("lightning",),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "ray": ("ray",),
    "lab": ("all",),
    "launch": ("torchft",),
}


def normalized(name: str) -> str:
    """The name of a distribution, as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared(project: dict[str, Any], *extras: str) -> dict[str, str]:
    """The requirements of the package and of extras, also of those within them, by the name of the distribution."""
    requirements = list(project["project"]["dependencies"])
    for extra in extras:
        requirements += project["project"]["optional-dependencies"][extra]
    found = {}
    for requirement in requirements:
        if own := re.fullmatch(r"lightning-pipesync\[(.*)\]", requirement):
            found |= declared(project, *own[1].split(","))
        else:
            found[normalized(re.split(r"[\[<>=!~; ]", requirement)[0])] = requirement
    return found


#: The distributions of each module, which are looked for in all that is installed.
distributions = cache(packages_distributions)


def installs(requirements: dict[str, str], module: str) -> bool:
    """Whether the requirements have a distribution with this module; of its name, if it is not installed."""
    return any(normalized(name) in requirements for name in distributions().get(module, [module]))


def test_every_import_is_declared(project: dict[str, Any]) -> None:
    of_twins = {twin: module for module, twins in TWINS.items() for twin in twins}
    of_twins["lightning_fabric"] = "lightning"
    of_twins["triton"] = "torch"  # which brings it where it is for CUDA
    of_twins["safetensors"] = "accelerate"  # which requires it
    for path in [*(ROOT / "lightning_pipesync").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        extras = EXTRAS_OF.get(path.relative_to(ROOT).parts[1], ())
        known = declared(project, *(("test", "torchft") if ROOT / "benchmarks" in path.parents else extras))
        for module in {name.partition(".")[0] for name in imports_of(path)}:
            if module not in {"lightning_pipesync", "benchmarks", "examples", *sys.stdlib_module_names}:
                assert installs(known, of_twins.get(module, module)), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_has_the_modules_that_errors_name(extra: str, project: dict[str, Any]) -> None:
    """And pyproject.toml has no other extra for users."""
    assert all(installs(declared(project, extra), module) for module in MODULES[extra])
    assert {"all", "examples", "test", "docs", *MODULES} == set(project["project"]["optional-dependencies"])


def test_one_extra_has_all_that_users_need(project: dict[str, Any]) -> None:
    """But not Ray, which is large, and comes with a cluster; torchft where it has wheels."""
    assert declared(project, "all").keys() == declared(project, *(set(MODULES) - {"ray"})).keys()


def test_the_oldest_constraints_are_the_lower_bounds(project: dict[str, Any]) -> None:
    known = declared(project, *project["project"]["optional-dependencies"])
    for line in (ROOT / "constraints-oldest.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        bound = re.search(r">=([\d.]+)", known.get(normalized(name), ""))
        if version and bound:
            assert re.sub(r"(\.0)+$", "", version) == re.sub(r"(\.0)+$", "", bound[1]), line


def test_the_version_has_one_source(project: dict[str, Any]) -> None:
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [lightning_pipesync.__version__]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [lightning_pipesync.__version__]
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", lightning_pipesync.__version__]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and with the wheel, which is built from the sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_the_sdist_has_what_the_tests_need(built: Path) -> None:
    """And no more: nothing of the repository's own, and nothing that git ignores."""
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git repository")
    expected = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    missing = {name for name in expected - names if not name.startswith(".")}
    assert not missing
    assert not {name for name in names if name.startswith((".venv", ".github", "outputs")) or "__pycache__" in name}


def test_the_wheel_is_used_where_the_sources_are_not(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightning_pipesync"}
    assert "lightning_pipesync/py.typed" in names
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    script = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import lightning_pipesync, lightning_pipesync.cli\n"
        "print(lightning_pipesync.__file__)\n"
        "assert lightning_pipesync.SelSyncStrategy(delta=0.3).config.delta == 0.3\n"
        "lightning_pipesync.cli.main(['--version'])\n"
    )
    result = subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    where, said = result.stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    assert said == f"pipesync {lightning_pipesync.__version__}"
    assert (installed / "bin" / "pipesync").exists()


#: Lightning's other packages in place of it.
TWIN = """
import sys
sys.modules["lightning"] = None
import lightning_pipesync, lightning_fabric, pytorch_lightning

from lightning_pipesync import PlanCallback, SelSyncStrategy, fabric
assert issubclass(SelSyncStrategy, pytorch_lightning.strategies.DDPStrategy)
assert issubclass(PlanCallback, pytorch_lightning.Callback)
trainer = pytorch_lightning.Trainer(strategy="selsync", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy) is SelSyncStrategy
found = lightning_fabric.Fabric(strategy="dear", accelerator="cpu", devices=1).strategy
assert type(found) is fabric.DeARFabricStrategy
assert not any(name.partition(".")[0] == "lightning" for name, module in sys.modules.items() if module)
"""


def test_the_twin_takes_the_place_of_lightning() -> None:
    result = subprocess.run([sys.executable, "-c", TWIN], capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result.stderr


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a user's own with configurations, beside a script."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("only_a_folder")
    assert is_installed("torch")
