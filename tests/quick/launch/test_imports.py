"""An import goes down the layers of docs/architecture.md, and no layer knows a framework that is not its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "lightning_pipesync"
#: From below to above.
LAYERS = [
    ["core"],
    ["launch"],
    ["data"],
    ["methods"],
    ["training"],
    ["fabric"],
    ["lightning", "accelerate"],
    ["transformers", "ray"],
    ["lab"],
]
FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "torchmetrics", "ray"}
ADAPTERS = {
    "lightning": {"lightning", "pytorch_lightning", "torchmetrics"},
    "fabric": {"lightning", "lightning_fabric", "lightning_utilities"},
    "accelerate": {"accelerate"},
    "transformers": {"transformers"},
    "ray": {"ray"},
    "lab": {"lightning", "pytorch_lightning", "transformers", "accelerate"},  # plans, drills, and takes models
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports, in functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""
            if node.module == "lightning_pipesync":
                yield from (f"lightning_pipesync.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", LEVEL)
def test_imports_go_down(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            package, _, rest = name.partition(".")
            assert package not in {"benchmarks", "examples", "tests"}, f"{path.relative_to(ROOT)} imports {name}"
            if package == "lightning_pipesync" and rest:
                other = rest.partition(".")[0]
                below = LEVEL.get(other, len(LAYERS)) < LEVEL[layer]
                assert other == layer or below, f"{path.relative_to(ROOT)} imports {name}"
            elif package in FRAMEWORKS:
                assert package in ADAPTERS.get(layer, ()), f"{path.relative_to(ROOT)} imports {name}"


def test_every_folder_is_on_a_level() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(LEVEL)


def test_only_the_command_opens_the_laboratory() -> None:
    """And the modules with its former names, and ``PlanCallback``, which is imported on request."""
    outside = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "lab"]
    opened_by = [path.name for path in outside if any("lightning_pipesync.lab" in name for name in imports_of(path))]
    assert sorted(opened_by) == ["__init__.py", "cli.py", "netlab.py", "plan.py"]


def test_pictures_have_one_palette() -> None:
    """A figure of matplotlib's own would have other colours."""
    drawn_by = [path for path in ROOT.rglob("*.py") if "matplotlib.figure" in set(imports_of(path))]
    assert drawn_by == [ROOT / "lab" / "bench" / "pictures.py"]


def test_triton_is_imported_when_a_kernel_is_launched() -> None:
    """Not with the package: it is missing on most machines without a GPU."""
    modules = {path.relative_to(ROOT / "core/codecs"): path for path in (ROOT / "core/codecs").rglob("*.py")}
    with_triton = {path for path in ROOT.rglob("*.py") if "triton" in set(imports_of(path))}
    kernels = {path for name, path in modules.items() if name.parent.name == "kernels"}
    assert with_triton < kernels
    users = {path for path in ROOT.rglob("*.py") if any("codecs.kernels" in name for name in imports_of(path))}
    assert users - kernels == {modules[Path("shards.py")]}
    for node in ast.parse(modules[Path("shards.py")].read_text()).body:
        assert not (isinstance(node, ast.ImportFrom) and "kernels" in (node.module or "")), "outside of a function"
