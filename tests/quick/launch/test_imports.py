"""An import goes down the layers of docs/architecture.md, and the package can be used without any framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.commands import environment

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
    "lab": {"lightning", "pytorch_lightning", "transformers", "accelerate"},  # plans, and takes models
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The modules that a file imports, in functions, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module or "")
            if node.module == "lightning_pipesync":
                found.update(f"lightning_pipesync.{alias.name}" for alias in node.names)
    return frozenset(found)


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
    """And ``PlanCallback`` and the advisor of a training, which are imported on request."""
    outside = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "lab"]
    opened_by = [path.name for path in outside if any("lightning_pipesync.lab" in name for name in imports_of(path))]
    assert sorted(opened_by) == ["__init__.py", "cli.py"]


def test_triton_is_imported_when_a_kernel_is_launched() -> None:
    """Not with the package: it is missing on most machines without a GPU."""
    modules = {path.relative_to(ROOT / "core/codecs"): path for path in (ROOT / "core/codecs").rglob("*.py")}
    with_triton = {path for path in ROOT.rglob("*.py") if "triton" in imports_of(path)}
    kernels = {path for name, path in modules.items() if name.parent.name == "kernels"}
    assert with_triton < kernels
    users = {path for path in ROOT.rglob("*.py") if any("codecs.kernels" in name for name in imports_of(path))}
    assert users - kernels == {modules[Path("shards.py")]}
    for node in ast.parse(modules[Path("shards.py")].read_text()).body:
        assert not (isinstance(node, ast.ImportFrom) and "kernels" in (node.module or "")), "outside of a function"


#: The modules of all optional packages, and of what these need besides.
OPTIONAL = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics", "accelerate"),
    *("transformers", "ray", "bayes_opt", "sklearn", "scipy", "pyroute2", "rich", "matplotlib"),
    *("torchft", "opentelemetry"),
)
WITHOUT = f"import sys\nsys.modules |= dict.fromkeys({OPTIONAL})\n"
#: What each public name says without them; a plain loop trains.
NEEDS = """
import lightning_pipesync
from importlib import import_module
from lightning_pipesync.cli import main

def said(what, extra, use):
    try:
        use()
    except ModuleNotFoundError as error:
        assert str(error) == f'{what}: pip install "lightning-pipesync[{extra}]"', error
        assert error.__cause__ is None and error.__context__ is None
    else:
        raise AssertionError(what)

for name in ("SelSyncStrategy", "DeARStrategy", "StepReport", "PlanCallback"):
    said(f"{name} needs Lightning", "lightning", lambda: getattr(lightning_pipesync, name))
for name in ("PipeSyncAccelerator", "PipeSyncPlugin"):
    said(f"{name} needs Accelerate", "accelerate", lambda: getattr(lightning_pipesync, name))
said("PipeSyncTrainer needs transformers, Accelerate", "transformers", lambda: lightning_pipesync.PipeSyncTrainer)
for name, of, needed, extra in (
    *((name, "fabric", "Lightning", "lightning") for name in ("fabric", "lightning", "lightning.twin", "fabric.twin")),
    ("accelerate", "accelerate", "Accelerate", "accelerate"),
    ("transformers", "transformers", "transformers, Accelerate", "transformers"),
    ("ray", "ray", "Ray, Lightning", "ray"),
):
    said(f"lightning_pipesync.{of} needs {needed}", extra, lambda: import_module(f"lightning_pipesync.{name}"))
try:
    from lightning_pipesync import SelSyncStrategy
except ImportError as error:
    assert "SelSyncStrategy needs Lightning" in str(error)
assert not hasattr(lightning_pipesync, "none_such")
from lightning_pipesync import *
assert DeAR is lightning_pipesync.DeAR
import torch
model = torch.nn.Linear(2, 2)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
sync = DeAR(model, torch.optim.SGD(model.parameters(), lr=0.1))
with step_report(sync):
    model(torch.ones(1, 2)).sum().backward()
    sync.step()
sync.detach()
main(["--help"])
"""


def test_the_core_needs_no_framework_and_what_needs_one_names_its_extra() -> None:
    command = [sys.executable, "-c", WITHOUT + NEEDS]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result.stderr
    assert "Available subcommands" in result.stdout
    assert "Seconds of each rank" in result.stdout
