"""Trainings that start in an interactive session: their processes are forked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment
from tests.support.harness import slots
from tests.support.notebook import CELLS
from tests.support.own_methods import OWN

STRATEGIES = [*(f"{name}_notebook" for name in OWN), "streaming-diloco-notebook"]
IN_FABRIC = [name for name in STRATEGIES if not name.startswith("ea_pipe")]


#: Later cells, by what they show.
SHOWN = {
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
    script = f"{CELLS}\nimport sys, traceback\nfolder = {str(folder)!r}\n"
    for name, cell in SHOWN.items():
        script += f"print('cell: {name}', flush=True)\n"
        script += f"try: exec({cell!r})\nexcept BaseException: traceback.print_exc(file=sys.stdout)\n"
    (folder / "script.py").write_text(script)
    words = [sys.executable, "-i", folder / "script.py"]
    with slots(2):
        given = {"env": environment(), "cwd": ROOT, "stdin": subprocess.DEVNULL}
        result = subprocess.run(words, capture_output=True, text=True, timeout=300, **given)
    assert "Traceback" not in result.stderr, result.stderr
    parts = [part.partition("\n") for part in result.stdout.split("cell: ")[1:]]
    return {name: said for name, _, said in parts}


def test_all_strategies_start_in_a_session(printed: dict[str, str]) -> None:
    assert printed["trainer"].split() == STRATEGIES
    assert printed["fabric"].split() == IN_FABRIC
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
