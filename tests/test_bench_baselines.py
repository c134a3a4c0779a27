"""The papers' baselines: what they train is what DDP trains, and MG-WFBP merges by its rule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.bench.baselines import merged
from lightning_pipesync.bench.candidates import METHODS
from lightning_pipesync.bench.models import build_model
from lightning_pipesync.core.cost import LinkCost
from tests.harness import launch

#: 1 ms a message, 1 s a MiB on two ranks.
LINK = LinkCost(alpha=1e-3, beta=1 / 2**20)


@pytest.mark.parametrize(
    ("ready", "mib", "groups"),
    [
        ([0.0, 1.0, 5.0], [0.5, 0.5, 0.5], [1, 1, 1]),  # each all-reduce has ended when the next gradient is ready
        ([0.0, 1.0, 1.2, 5.0], [2.0, 0.5, 0.5, 0.5], [1, 2, 1]),  # two are ready while the first is under way
        ([0.0, 0.001, 0.5], [0.1, 0.1, 0.1], [2, 1]),  # the second is ready within the startup time
        ([0.0, 0.1, 0.2], [4.0, 1.0, 1.0], [1, 2]),
    ],
)
def test_tensors_are_merged_where_a_message_costs_more(ready: list[float], mib: list[float], groups: list[int]) -> None:
    assert merged(ready, [round(size * 2**20) for size in mib], LINK, world_size=2) == groups


def train(names: list[str]) -> dict[str, torch.Tensor]:
    """Returns all weights after three steps of each candidate, which begin when it is prepared."""
    weights = {}
    for name in names:
        [make] = METHODS[name]([0.01])
        torch.manual_seed(0)
        candidate = make(build_model("cnn"))
        initial = copy.deepcopy(candidate.model.module.state_dict())
        candidate.prepare()
        candidate.model.module.load_state_dict(initial)
        candidate.optimizer.state.clear()
        for _ in range(3):
            candidate.step()
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in candidate.model.module.parameters()])
        candidate.close()
    dist.barrier()
    return weights


def test_trains_what_ddp_trains() -> None:
    """Bit for bit on two ranks; MG-WFBP with the tensors merged."""
    names = ["ddp", "serial", "wfbp", "mg-wfbp"]
    first, second = launch(train, 2, names)
    for name in names:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], first["ddp"]), name
