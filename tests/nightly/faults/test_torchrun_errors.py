"""Under torchrun the last lines of the output name the rank at fault, whose error is in the midst of it otherwise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment, run_together

LOOP = """
import torch
import torch.distributed as dist
from lightning_pipesync import SelSync

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = SelSync(model, optimizer, delta=0.0)
for i in range(100):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    if i == 3 and dist.get_rank() == 1:
        raise KeyError("a bug in the loop")
    sync.step()
"""
TRAINER = """
import lightning_pipesync
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            raise KeyError("a bug in the loop")
        return super().training_step(batch, batch_idx)

trainer = Trainer(strategy="selsync", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model())
"""


@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=["loop", "trainer"])
def test_the_last_lines_name_the_rank_at_fault(script: str, tmp_path: Path) -> None:
    """They are the traceback of the rank that ended first: of the one at fault, or of one that names it."""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    [result] = run_together(([*command, tmp_path / "train.py"], environment()))
    assert result.returncode == 1, result.stdout
    said = result.stdout.rpartition("Root Cause (first observed failure):")[2].rstrip("=\n ")
    last = said.splitlines()[-1].strip()
    if re.search(r"^  rank +: 1 ", said, re.MULTILINE):
        assert last == "KeyError: 'a bug in the loop'", result.stdout
    else:
        assert re.match(r"(RuntimeError: )?Rank 1 \(host .*is at fault: it raised KeyError: 'a bug in", last), last


ENDS = """
import sys
from lightning_pipesync.core.faults.errors import add_last_line
from lightning_pipesync.core.faults.torchrun import report_error_at_shutdown
report_error_at_shutdown()
report_error_at_shutdown()
lost = RuntimeError("Connection closed by peer")
add_last_line(lost, "Rank 1 is at fault")
{end}
"""


@pytest.mark.parametrize(
    ("end", "before", "after"),
    [
        ("raise KeyError('a bug')", None, "KeyError: 'a bug'"),
        ("raise KeyError('a bug')", "what @record has written", "what @record has written"),
        ("raise lost", "without that line", "RuntimeError: Connection closed by peer\nRank 1 is at fault"),
        ("sys.exit(3)", None, None),
        ("", None, None),
    ],
)
def test_the_error_that_ends_a_process_is_reported(
    end: str, before: str | None, after: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"
    if before is not None:
        file.write_text(json.dumps({"message": {"message": before}}))
    command = [sys.executable, "-c", ENDS.format(end=end)]
    subprocess.run(command, env=environment(TORCHELASTIC_ERROR_FILE=file), capture_output=True)
    assert (json.loads(file.read_text())["message"]["message"] if file.exists() else None) == after
