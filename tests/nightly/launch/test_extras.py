"""Without optional packages the core works, and what needs one names the extra that installs it, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pipesync.core import extras
from tests.support.commands import environment, run_together
from tests.support.harness import free_port

#: The modules of all optional packages, and of what these need besides.
OPTIONAL = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics", "accelerate"),
    *("transformers", "ray", "bayes_opt", "sklearn", "scipy", "pyroute2", "rich", "matplotlib"),
    *("torchft", "opentelemetry"),
)
WITHOUT = f"import sys\nsys.modules |= dict.fromkeys({OPTIONAL})\n"

LOOP = """
import lightning_pipesync, torch, torch.distributed as dist
from torch.optim import SGD
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(512, 1024)  # 2 MiB, so that there would be a search
optimizer = SGD(model.parameters(), lr=0.1)
sync = lightning_pipesync.DeAR(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    mse_loss(model(torch.randn(4, 512)), torch.zeros(4, 1024)).backward()
    sync.step()
sync.flush()
sums = [None, None]
dist.all_gather_object(sums, float(model.weight.double().sum()))
print("trained" if sums[0] == sums[1] else sums, sync.tuned, sync.fusion.bucket_mb)
sync.detach()
"""

LINES = """
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
for name in ("fabric", "lightning", "lightning.twin", "fabric.twin"):
    said("lightning_pipesync.fabric needs Lightning", "lightning", lambda: import_module(f"lightning_pipesync.{name}"))
said(
    "lightning_pipesync.accelerate needs Accelerate", "accelerate",
    lambda: import_module("lightning_pipesync.accelerate"),
)
said(
    "lightning_pipesync.transformers needs transformers, Accelerate", "transformers",
    lambda: import_module("lightning_pipesync.transformers"),
)
said("lightning_pipesync.ray needs Ray, Lightning", "ray", lambda: import_module("lightning_pipesync.ray"))
try:
    from lightning_pipesync import SelSyncStrategy
except ImportError as error:
    assert "SelSyncStrategy needs Lightning" in str(error)
assert not hasattr(lightning_pipesync, "none_such")
for words in (
    "plan", "launch a.py", "launch --replicas 2 a.py", "lighthouse", "netlab --hosts 2 -- true", "bench step"
):
    assert main(words.split()) == 2
main(["--help"])
"""

TWIN = """
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


def run(script: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result.stderr
    return result


def test_what_is_missing_is_one_line() -> None:
    result = run(WITHOUT + LINES)
    assert "Available subcommands" in result.stdout
    missing = [
        ("plan", "matplotlib, pyroute2, rich", "plan"),
        ("launch", "Accelerate", "accelerate"),
        ("launch", "torchft", "torchft"),
        ("lighthouse", "torchft", "torchft"),
        ("netlab", "pyroute2", "netlab"),
        ("bench step", "matplotlib, pyroute2, rich", "bench"),
    ]
    assert result.stderr.splitlines() == [
        f'pipesync: error: pipesync {name} needs {packages}: pip install "lightning-pipesync[{extra}]"'
        for name, packages, extra in missing
    ]


def test_a_plain_loop_needs_the_core_only() -> None:
    """DeAR does not search for a bucket size, and says so."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}
    command = [sys.executable, "-c", WITHOUT + LOOP]
    ranks = run_together(*((command, environment(**job, RANK=rank)) for rank in range(2)))
    needs = "fusion='bo' needs bayesian-optimization: pip install \"lightning-pipesync[tune]\". "
    for rank, result in enumerate(ranks):
        assert result.returncode == 0, result.stdout
        assert "trained True 25.0" in result.stdout
        assert (needs + "Without it the buckets keep the size of bucket_mb=25.0." in result.stdout) == (rank == 0)


def test_the_twin_takes_the_place_of_lightning() -> None:
    run(f"import sys\n{TWIN}")


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a user's own with configurations, beside a script."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not extras.is_installed("only_a_folder")
    assert extras.is_installed("torch")
