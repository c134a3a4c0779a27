"""A rank's state that was damaged in a checkpoint is refused on all ranks, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from tests.conformance.launches import HUNG_S
from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.harness import launch, raised

AT = 4
CASES = [
    ("lightning", "dear"),
    ("lightning", "selsync"),
    ("lightning", "ea_pipe"),
    ("fabric", "pipe_sgd"),
    ("fabric", "local_sgd"),
    ("accelerate", "dear"),
    ("accelerate", "selsync"),
    ("accelerate", "ea_pipe"),
]


def flip_a_bit(tree: Any) -> None:
    """Changes the lowest bit of the first value of the largest tensor."""
    tensors = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
    values = max(tensors, key=Tensor.numel).reshape(-1)
    values.view(torch.uint8)[0] ^= 1


def damage_rank_1(framework: str, path: Path) -> None:
    file = {"lightning": Path(f"{path}.ckpt"), "fabric": path, "accelerate": path / "pipesync_1.bin"}[framework]
    saved = torch.load(file, weights_only=True)
    flip_a_bit(saved["states"] if framework == "accelerate" else saved["pipesync"]["ranks"][1])
    torch.save(saved, file)


def cut_rank_1(path: Path) -> None:
    file = path / "pipesync_1.bin"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def run(framework: str, name: str, path: Path, resumes: bool) -> tuple[str, str] | None:
    method = METHODS[name]
    given = {"resume": Checkpoint(Path(f"{path}-{AT}"), AT)} if resumes else {"save": Checkpoint(path, AT)}
    return raised(lambda: train(framework, method, method.typical[0], Options("adamw"), **given))


@pytest.mark.parametrize(
    ("framework", "name", "cut"), [*((*case, False) for case in CASES), ("accelerate", "dear", True)]
)
def test_a_damaged_part_is_refused_on_all_ranks(framework: str, name: str, cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    options: dict[str, Any] = {"init": False, "timeout_s": HUNG_S}
    assert launch(run, 2, framework, name, path, False, **options) == [None, None]
    if cut:
        cut_rank_1(Path(f"{path}-{AT}"))
    else:
        damage_rank_1(framework, Path(f"{path}-{AT}"))
    for outcome in launch(run, 2, framework, name, path, True, **options):
        assert outcome is not None
        assert outcome[0] == "ValueError", outcome
        assert "state of rank 1" in outcome[1]
        assert "damaged" in outcome[1]
        assert ("pipesync_1.bin" if framework == "accelerate" else "'pipesync'") in outcome[1]
