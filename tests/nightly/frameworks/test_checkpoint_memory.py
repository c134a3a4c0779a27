"""A checkpoint holds a replica of each rank: a rank that loads it has room for its own."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

import lightning_pipesync
from lightning_pipesync.core.buckets import MIB
from tests.support.harness import launch

RANKS, REPLICA_MIB = 8, 32
STRATEGIES = {
    "Trainer": lightning_pipesync.LocalSGDStrategy,
    "Fabric": lightning_pipesync.fabric.LocalSGDFabricStrategy,
}


class OwnIO(TorchCheckpointIO):
    """A user's, which counts what it loads."""

    num_loaded = 0

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.num_loaded += 1
        return super().load_checkpoint(*args, **kwargs)


def save(path: Path) -> None:
    replicas = {rank: {"weights": torch.full((REPLICA_MIB * MIB // 4,), float(rank))} for rank in range(RANKS)}
    section = {"strategy": "local_sgd", "world_size": RANKS, "ranks": replicas}
    torch.save({"state_dict": {"weight": torch.ones(4)}, "pipesync": section}, path)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def load(framework: str, path: Path) -> tuple[float, list[int], float]:
    strategy = STRATEGIES[framework]()
    strategy.load_checkpoint(path.with_name("small.ckpt"))  # what is imported at the first time
    before = peak_mib()
    loaded = strategy.load_checkpoint(path)
    grown = peak_mib() - before
    path.write_bytes(b"")  # the next checkpoint may replace it
    ranks = loaded["pipesync"]["ranks"]
    return grown, sorted(ranks), float(ranks[0]["weights"].sum() + loaded["state_dict"]["weight"].sum())


@pytest.mark.parametrize("framework", STRATEGIES)
def test_only_this_ranks_replica_is_in_memory(framework: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "small.ckpt")
    save(tmp_path / "last.ckpt")
    [(grown, ranks, total)] = launch(load, 1, framework, tmp_path / "last.ckpt", init=False)
    assert ranks == [0]
    assert total == 4.0
    assert grown < 3 * REPLICA_MIB, "there are eight"


@pytest.mark.parametrize("framework", STRATEGIES)
def test_a_users_checkpoint_io_loads_the_file(framework: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(4)}}, tmp_path / "last.ckpt")
    own = OwnIO()
    loaded = partial(STRATEGIES[framework], checkpoint_io=own)().load_checkpoint(tmp_path / "last.ckpt")
    assert own.num_loaded == 1
    assert torch.equal(loaded["state_dict"]["weight"], torch.ones(4))
