"""Trainers on two machines, started by the launch files of torchrun: each strategy, and a restart after a fault."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nightly.launch import machine_fits
from tests.nightly.launch.machine_fits import EPOCHS, RESUMED, SAVE_EVERY, STEPS, STRATEGIES
from tests.support.commands import run_together, two_machines
from tests.support.lightning_models import SAMPLES


def fits(launcher: str, what: str, folder: Path, ranks: int, **variables: object) -> list[dict[str, Any]]:
    """Returns what each rank has found."""
    commands = two_machines(launcher, [machine_fits.__file__, what, folder], **variables)
    for machine in run_together(*commands, timeout_s=400, ranks=ranks):
        assert machine.returncode == 0, machine.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return fits("static.sh", "each", tmp_path_factory.mktemp("fits"), 4, NPROC_PER_NODE=2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_machines_of_two_processes(name: str, ranks: list[dict[str, Any]]) -> None:
    found = [rank[name] for rank in ranks]
    places = [{"rank": rank, "local": rank % 2, "machine": rank // 2, "world": 4} for rank in range(4)]
    assert [one["place"] for one in found] == places
    for one in found:
        assert torch.equal(one["weights"], found[0]["weights"])
        assert not torch.equal(one["weights"], one["initial"])
    for epoch in range(EPOCHS):
        share = SAMPLES if name == "ea_pipe" else SAMPLES // 4
        samples = [one["samples"][epoch * share : (epoch + 1) * share] for one in found]
        assert {len(own) for own in samples} == {share}
        if name == "ea_pipe":
            assert samples == [samples[0]] * 4
        # Together the ranks see every sample once an epoch; with EA-Pipe each does.
        together = samples[:1] if name == "ea_pipe" else samples
        assert sorted(chain(*together)) == list(range(SAMPLES))


def test_a_row_of_the_torus_is_a_machine(ranks: list[dict[str, Any]]) -> None:
    assert [rank["dear"]["row"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("name", RESUMED)
def test_machines_that_do_not_see_the_same_checkpoints_are_refused(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kind, message = rank["refused"][name]
        assert kind == "ValueError"
        assert "rank 0 has one of step 2, rank 2 has none" in message


def test_a_restarted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """A process dies, torchrun starts all again, and the training ends as if nothing had happened."""
    found = fits("elastic.sh", "elastic", tmp_path, 2, NPROC_PER_NODE=1, MAX_RESTARTS=1)
    assert (tmp_path / "killed").exists()
    for rank in found:
        assert (rank["interrupted"]["began"], rank["whole"]["began"]) == (SAVE_EVERY, 0)
        for run in rank.values():
            assert run["ended"] == STEPS
            assert torch.equal(run["weights"], found[0]["whole"]["weights"])
