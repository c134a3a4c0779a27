"""A process dies, torchrun starts all again, and the training ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.nightly.launch.elastic_fits import SAVE_EVERY, STEPS, STRATEGIES
from tests.support.commands import ROOT, run_together, two_machines


def test_restarted_runs_end_with_the_weights_of_uninterrupted_ones(tmp_path: Path) -> None:
    script = [ROOT / "tests" / "elastic_fits.py", tmp_path]
    commands = two_machines("elastic.sh", script, NPROC_PER_NODE=1, MAX_RESTARTS=len(STRATEGIES))
    for machine in run_together(*commands, timeout_s=400):
        assert machine.returncode == 0, machine.stdout

    for name in STRATEGIES:
        assert (tmp_path / f"{name} was killed").exists()
        interrupted, whole = (
            [torch.load(tmp_path / f"{run}.{rank}.pt") for rank in range(2)] for run in (name, f"{name} whole")
        )
        assert [one["began"] for one in interrupted] == [SAVE_EVERY] * 2
        assert [one["began"] for one in whole] == [0, 0]
        for one in [*interrupted, *whole]:
            assert one["ended"] == STEPS
            assert torch.equal(one["weights"], whole[0]["weights"]), name
