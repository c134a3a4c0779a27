"""Each launcher once: torchrun by a launch file, Accelerate's, replicas as jobs, and the kernel of a notebook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_pipesync.core.extras import is_installed
from tests.support.commands import ROOT, launched, run_together, two_machines
from tests.support.notebook import CELLS

#: A Trainer on the processes of a launcher; each prints its place and the sum of its weights.
TRAINER = """
import os, sys
from tests.support.lightning_models import Classifier, launched_trainer, train_loader

model = Classifier()
trainer = launched_trainer("selsync", sys.argv[1], max_epochs=1)
trainer.fit(model, train_loader())
place = trainer.global_rank, trainer.node_rank, trainer.world_size, trainer.global_step
sys.stdout.write(f"trained {place} {model.weights().double().sum():.17g}\\n")
"""
ACCELERATE = """
import sys, torch
from lightning_pipesync import PipeSyncAccelerator

accelerator, model = PipeSyncAccelerator(), torch.nn.Linear(4, 6)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).square().sum())
optimizer.step()
sys.stdout.write(f"{type(model.method).__name__} on {accelerator.num_processes} processes\\n")
accelerator.end_training()
"""
#: Replica 1 is killed in its sixth step, and comes back; then both train for as many steps more.
REPLICAS = """
import os, signal, sys, torch
from lightning_pipesync import LocalSGD
from tests.support.models import loss, seeded_mlp

PERIOD, KILLED, MORE = 3, 5, 6
name = os.environ["PIPESYNC_REPLICA"]
begun = os.path.join(os.path.dirname(__file__), "begun")
is_back = os.path.exists(begun)
model = seeded_mlp(int(name), batch_norm=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sync = LocalSGD(model, optimizer, period=PERIOD, outer_optimizer="nesterov", timeout_s=100)
sync.join()
left = MORE if is_back else None
while left != 0:
    if name == "1" and not is_back and sync.num_steps == KILLED:
        open(begun, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss(model, sync.num_steps, int(name)).backward()
    sync.step()
    if left is not None:
        left -= 1
    elif sync.num_steps > KILLED and sync.num_steps % PERIOD == 0 and sync.metrics()["replicas"] == 2:
        left = MORE  # the round has taken it in
sync.flush()
sums = " ".join(f"{float(tensor.double().sum()):.17g}" for tensor in model.state_dict().values())
sys.stdout.write(f"weights {sums}\\n")
sync.detach()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_torchrun_starts_a_trainer_on_two_machines(script: Path, tmp_path: Path) -> None:
    script.write_text(TRAINER)
    machines = run_together(*two_machines("static.sh", [script, tmp_path], NPROC_PER_NODE=1))
    for machine in machines:
        assert machine.returncode == 0, machine.stdout
    trained = re.findall(r"trained (\(.*\)) (.*)", "".join(machine.stdout for machine in machines))
    assert sorted(place for place, _ in trained) == ["(0, 0, 2, 8)", "(1, 1, 2, 8)"]
    assert len({weights for _, weights in trained}) == 1


def test_accelerate_launch_gives_the_method_of_its_file(script: Path, tmp_path: Path) -> None:
    script.write_text(ACCELERATE)
    file = ROOT / "integrations" / "accelerate" / "selsync_cpu.yaml"
    [status], output = launched(("pipesync", ["launch", "--config_file", file, script]), folder=tmp_path)
    assert status == 0, output
    assert output.count("SelSync on 2 processes") == 2, output


@pytest.mark.skipif(not is_installed("torchft"), reason="torchft is not installed")
def test_a_replica_that_is_killed_comes_back(script: Path, tmp_path: Path) -> None:
    script.write_text(REPLICAS)
    options = ["--replicas", 2, "--backoff_s", 0.1, "--heartbeat_timeout_s", 10]
    [status], output = launched(("pipesync", ["launch", *options, script]), folder=tmp_path)
    assert status == 0, output
    assert "replica 1 was killed by SIGKILL; it starts again in 0.1 s (restart 1 of 3)." in output
    weights = re.findall(r"\[replica (\d)\] weights (.*)", output)
    assert sorted(name for name, _ in weights) == ["0", "1"], output
    assert len({sums for _, sums in weights}) == 1, output


def test_a_notebook_starts_a_strategy_or_names_one_that_can_start(tmp_path: Path) -> None:
    """In a kernel of Jupyter."""
    import nbclient  # imported here because its import is slow
    import nbformat

    cells = [
        CELLS,
        f"fit('selsync_notebook', '{tmp_path}')",
        "try:\n  Trainer(strategy='dear', **QUIET)\nexcept ValueError as e: print(e)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert "strategy='dear_notebook'" in notebook.cells[-1].outputs[0].text
