"""A rank's state that was damaged in a checkpoint is refused on all ranks, by name."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from tests.case_table import launch_cases
from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.harness import assert_raised, raised

AT = 3
#: By framework, each method, and whether the file of rank 1 is cut off, not changed.
CASES = {
    "lightning": [("dear", False), ("selsync", False), ("ea_pipe", False)],
    "fabric": [("pipe_sgd", False), ("local_sgd", False)],
    "accelerate": [("dear", False), ("selsync", False), ("ea_pipe", False), ("dear", True)],
}


def flip_a_bit(tree: Any) -> None:
    """Changes the lowest bit of the first value of the largest tensor."""
    tensors = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
    values = max(tensors, key=Tensor.numel).reshape(-1)
    values.view(torch.uint8)[0] ^= 1


def damage_rank_1(framework: str, path: Path, cut: bool) -> None:
    file = {"lightning": Path(f"{path}.ckpt"), "fabric": path, "accelerate": path / "pipesync_1.bin"}[framework]
    if cut:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return
    saved = torch.load(file, weights_only=True)
    flip_a_bit(saved["states"] if framework == "accelerate" else saved["pipesync"]["ranks"][1])
    torch.save(saved, file)


def resume_damaged(framework: str, name: str, cut: bool, path: Path) -> tuple[str, str] | None:
    method = METHODS[name]
    run = partial(train, framework, method, method.typical[0], Options("adamw"))
    saved = Checkpoint(path, AT)
    run(save=saved)
    dist.barrier()
    if os.environ["RANK"] == "0":
        damage_rank_1(framework, saved.first.path, cut)
    dist.barrier()
    return raised(lambda: run(resume=saved.first))


@pytest.mark.parametrize("framework", CASES)
def test_a_damaged_part_is_refused_on_all_ranks(framework: str, tmp_path: Path) -> None:
    cases = {
        (name, cut): partial(resume_damaged, framework, name, cut, tmp_path / f"{name} {cut}")
        for name, cut in CASES[framework]
    }
    outcomes = launch_cases(cases, 2, init=False)
    file = "pipesync_1.bin" if framework == "accelerate" else "'pipesync'"
    for case in cases:
        for outcome in outcomes[case]:
            assert_raised(outcome, "ValueError", "state of rank 1", "damaged", file)
