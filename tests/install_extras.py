"""Each extra alone: the wheel is installed with it in a clean environment, and what it is for is used.

``make test-extras`` runs this; it downloads packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipesync.core.extras import MODULES

ROOT = Path(__file__).parents[1]

TRAINER = """
import torch
from torch.utils.data import DataLoader
from lightning_pipesync import *

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for strategy in ("dear", SelSyncStrategy(delta=0.3)):
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[StepReport(table=True)],
    )
    trainer.fit(Model(), DataLoader(torch.randn(8, 8), batch_size=4))
    assert trainer.global_step == 2
strategy = Fabric(strategy="dear", accelerator="cpu", devices=1).strategy
assert type(strategy).__name__ == "DeARFabricStrategy"
assert "PipeSyncPlugin" not in globals()
"""

#: By extra, what a user does with it.
USES = {
    "": """
import torch
from importlib.util import find_spec
from lightning_pipesync import *
from lightning_pipesync.cli import main

torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = torch.nn.Linear(8, 1)
sync = DeAR(model, torch.optim.SGD(model.parameters(), lr=0.1))
with step_report(sync):
    model(torch.randn(4, 8)).sum().backward()
    sync.step()
sync.detach()
for name in ("lightning", "accelerate", "transformers", "bayes_opt", "sklearn", "pyroute2", "matplotlib", "torchft"):
    assert find_spec(name) is None
assert main(["plan"]) == 2
main(["--help"])
""",
    "lightning": (
        f"from lightning.fabric import Fabric\nfrom lightning.pytorch import LightningModule, Trainer\n{TRAINER}"
    ),
    "pytorch-lightning": (
        f"from lightning_fabric import Fabric\nfrom pytorch_lightning import LightningModule, Trainer\n{TRAINER}"
    ),
    "accelerate": """
import os, torch
from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.cli import main

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
model = torch.nn.Linear(8, 1)
accelerator = PipeSyncAccelerator(cpu=True, pipesync=PipeSyncPlugin.from_mapping({"method": "selsync", "delta": "0.3"}))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.randn(4, 8)).sum())
optimizer.step()
assert main(["launch", "train.py"]) == 2
""",
    "transformers": """
from transformers import Trainer
from lightning_pipesync import PipeSyncTrainer

assert issubclass(PipeSyncTrainer, Trainer)
""",
    "ray": """
from lightning_pipesync.ray import RayDeARStrategy
from ray.train.lightning import RayDDPStrategy

assert issubclass(RayDeARStrategy, RayDDPStrategy)
""",
    "torchft": """
from pathlib import Path
from lightning_pipesync.cli import main

Path("train.py").write_text("import os; assert os.environ['PIPESYNC_LIGHTHOUSE']")
assert main(["launch", "--replicas", "2", "train.py"]) == 0
""",
    "tune": """
from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.methods.dear.fusion_search import BayesianSearch, Trial

search, trials = BayesianSearch(Fusion(bucket_mb=25), 1, 64, 8), [Trial(Fusion(bucket_mb=25), 1.0)]
while not search.converged(trials):
    trials.append(Trial(search.suggest(trials), 1.0))
""",
    "netlab": """
import sys
from lightning_pipesync.lab.netlab import Network
from lightning_pipesync.lab.netlab.job import prefixed

Network(2, "1gbit")
if sys.platform == "linux":
    from lightning_pipesync.lab.netlab import kernel
sys.stdout.isatty = lambda: True
prefixed(2)(0, "a line")
""",
    "plan": """
from lightning_pipesync.cli import main

assert main("plan --hosts 2 --model cnn --rounds 0 --output plan".split()) == 0
""",
    "bench": """
from lightning_pipesync.cli import main
from lightning_pipesync.lab.bench.models import build_model

build_model("resnet50")
assert main("bench step --hosts 2 --model cnn --methods ddp dear --steps 2 --rounds 1 --output bench".split()) == 0
""",
    "all": """
import platform
import lightning_pipesync, lightning_pipesync.fabric, lightning_pipesync.transformers
from importlib.util import find_spec
from lightning_pipesync import *

assert {"PipeSyncPlugin", "PlanCallback", "SelSyncStrategy", "DeAR"} <= set(globals())
assert find_spec("torchft") or (platform.system(), platform.machine()) != ("Linux", "x86_64")
""",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


def run(*command: object, folder: Path) -> str:
    """Runs a command in a folder without the packages of this environment; returns what it has printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def install(folder: Path, *packages: object) -> None:
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*pip, *packages, folder=folder)


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new environment with the wheel and what it requires; removed afterwards, as it has torch."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder, with_pip=True)
    install(folder, wheel)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def clean(core: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of that environment, of links to its files: pip replaces files, and changes none."""
    folder = tmp_path / "environment"
    shutil.copytree(core, folder, symlinks=True, copy_function=os.link)
    yield folder
    shutil.rmtree(folder)


def test_every_extra_is_used() -> None:
    assert set(USES) == {"", "pytorch-lightning", "all", *MODULES}


@pytest.mark.parametrize("extra", USES, ids=lambda extra: extra or "none")
def test_an_extra_alone(extra: str, wheel: Path, clean: Path, tmp_path: Path) -> None:
    if extra:
        install(clean, "pytorch-lightning" if extra == "pytorch-lightning" else f"{wheel}[{extra}]")
    run(clean / "bin" / "python", "-c", USES[extra], folder=tmp_path)
    assert run(clean / "bin" / "python", "-m", "lightning_pipesync", "--version", folder=tmp_path).startswith(
        "pipesync "
    )
