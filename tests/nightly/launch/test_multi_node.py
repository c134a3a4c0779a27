"""Each strategy on two machines of two processes, started by torchrun."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from tests.nightly.launch.multi_node_fits import EPOCHS, RESUMED, STRATEGIES
from tests.support.commands import ROOT, run_together, two_machines
from tests.support.lightning_models import SAMPLES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("fits")
    script = ROOT / "tests" / "multi_node_fits.py"
    for machine in run_together(*two_machines("static.sh", [script, folder], NPROC_PER_NODE=2)):
        assert machine.returncode == 0, machine.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_machines_of_two_processes(name: str, ranks: list[dict[str, Any]]) -> None:
    found = [rank["found"][name] for rank in ranks]
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
    assert [rank["found"]["dear"]["row"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("name", RESUMED)
def test_machines_that_do_not_see_the_same_checkpoints_are_refused(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kind, message = rank["refused"][name]
        assert kind == "ValueError"
        assert "rank 0 found one of step 2, rank 2 found no checkpoint" in message
