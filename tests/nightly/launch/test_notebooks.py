"""Trainings that start in an interactive session: their processes are forked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment
from tests.support.own_methods import OWN

#: The first cells of a user.
TRAIN = """
import torch
import lightning_pipesync
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

QUIET = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "max_epochs": 1}

def fit(strategy, folder):
    saving = callbacks.ModelCheckpoint(folder, save_weights_only=True)
    model, trainer = Model(), Trainer(strategy=strategy, callbacks=saving, **QUIET)
    trainer.fit(model, DataLoader(torch.ones(32, 8), 4))
    saved = torch.load(saving.best_model_path, weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
        assert not torch.equal(value, Model().state_dict()[name]), name
    assert trainer.callback_metrics["loss"] > 0

def train(fabric):
    model = Model()
    model, optimizer = fabric.setup(model.layers, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(model(torch.ones(4, 8)).mean())
    optimizer.step()
    return fabric.world_size

def train_with_fabric(strategy):
    assert Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train) == 2
"""
STRATEGIES = [
    *(f"{name}_notebook" for name in OWN),
    "diloco_notebook",
    "streaming-diloco-notebook",
    "local-sgd_notebook",
]
IN_FABRIC = [name for name in STRATEGIES if not name.startswith("ea_pipe")]


#: Later cells, by what they show.
CELLS = {
    "trainer": f"for name in {STRATEGIES}: fit(name, f'{{folder}}/{{name}}'); print(name)",
    "fabric": f"for name in {IN_FABRIC}: train_with_fabric(name); print(name)",
    "accelerate": """
import os
os.environ["ACCELERATE_USE_CPU"] = "true"
from accelerate import notebook_launcher
from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin

def train():
    accelerator, model = PipeSyncAccelerator(pipesync=PipeSyncPlugin("selsync")), Model().layers
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(4, 8)).mean())
    optimizer.step()
    assert accelerator.num_processes == 2
    accelerator.end_training()
    if accelerator.is_main_process:
        print("trained", flush=True)

notebook_launcher(train, num_processes=2)
""",
    "error": """
class Bad(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            raise KeyError("a bug")
        return super().training_step(batch, batch_idx)

try:
    Trainer(strategy="selsync_notebook", **QUIET).fit(Bad(), DataLoader(torch.ones(32, 8), 4))
except Exception as error:
    print(str(error).strip())
""",
    **{
        framework: f"""
try:
    {framework}(strategy='selsync', accelerator='cpu', devices=2)
except ValueError as error:
    print(error)
"""
        for framework in ("Trainer", "Fabric")
    },
}


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """What each cell has printed in an interactive session, or its traceback."""
    script = f"{TRAIN}\nimport sys, traceback\nfolder = {str(folder)!r}\n"
    for name, cell in CELLS.items():
        script += f"print('cell: {name}', flush=True)\n"
        script += f"try: exec({cell!r})\nexcept BaseException: traceback.print_exc(file=sys.stdout)\n"
    (folder / "script.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "-i", folder / "script.py"],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert "Traceback" not in result.stderr, result.stderr
    parts = [part.partition("\n") for part in result.stdout.split("cell: ")[1:]]
    return {name: said for name, _, said in parts}


def test_all_strategies_start_in_a_session(printed: dict[str, str]) -> None:
    assert printed["trainer"].split() == STRATEGIES


def test_all_strategies_of_fabric_start_in_a_session(printed: dict[str, str]) -> None:
    assert printed["fabric"].split() == IN_FABRIC


def test_accelerate_starts_in_a_session(printed: dict[str, str]) -> None:
    assert "trained" in printed["accelerate"]
    assert "Traceback" not in printed["accelerate"]


def test_the_error_of_a_session_names_the_rank_at_fault(printed: dict[str, str]) -> None:
    """It is the traceback of the rank that ended first: of the one at fault, or of one that names it."""
    said = printed["error"].splitlines()
    if said[0].startswith("-- Process 1 "):
        assert said[-1] == "KeyError: 'a bug'"
    else:
        assert said[-1].startswith("RuntimeError: Rank 1 (host "), said


@pytest.mark.parametrize("framework", ["Trainer", "Fabric"])
def test_a_strategy_that_cannot_start_names_one_that_can(framework: str, printed: dict[str, str]) -> None:
    said = printed[framework]
    assert "strategy='selsync' cannot start processes in an interactive session" in said
    assert "set strategy='selsync_notebook'" in said
    assert "start_method='fork'" in said


def test_a_notebook(tmp_path: Path) -> None:
    """In a kernel of Jupyter."""
    import nbclient  # imported here because its import is slow
    import nbformat

    cells = [
        TRAIN,
        f"fit('selsync_notebook', '{tmp_path}')",
        "try:\n  Trainer(strategy='dear', **QUIET)\nexcept ValueError as e: print(e)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert "strategy='dear_notebook'" in notebook.cells[-1].outputs[0].text
