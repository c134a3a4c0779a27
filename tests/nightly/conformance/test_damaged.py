"""A checkpoint that was damaged, or a rank's state in it, is refused on all ranks, by name."""

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

from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, raised

AT = 3
#: By framework, each method, and how it is damaged: the state of rank 1 has changed, the file with it is cut off, or a
#: file that all ranks need has changed on the disk.
CASES = {
    "lightning": [("dear", "state"), ("selsync", "state"), ("ea_pipe", "state"), ("local_sgd", "disk")],
    "fabric": [("pipe_sgd", "state"), ("local_sgd", "state"), ("selsync", "disk")],
    "accelerate": [("dear", "state"), ("selsync", "state"), ("ea_pipe", "state"), ("dear", "cut"), ("dear", "disk")],
}


def flip_a_bit(tree: Any) -> None:
    """Changes the lowest bit of the first value of the largest tensor."""
    tensors = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
    values = max(tensors, key=Tensor.numel).reshape(-1)
    values.view(torch.uint8)[0] ^= 1


def damage(framework: str, path: Path, how: str) -> None:
    in_folder = path / ("optimizer.bin" if how == "disk" else "pipesync_1.bin")
    file = {"lightning": Path(f"{path}.ckpt"), "fabric": path, "accelerate": in_folder}[framework]
    content = file.read_bytes()
    middle = len(content) // 2
    if how == "cut":
        file.write_bytes(content[:middle])
        return
    if how == "disk":
        block = bytes(255 - byte for byte in content[middle : middle + 256])
        file.write_bytes(content[:middle] + block + content[middle + 256 :])
        return
    saved = torch.load(file, weights_only=True)
    flip_a_bit(saved["states"] if framework == "accelerate" else saved["pipesync"]["ranks"][1])
    torch.save(saved, file)


def resume_damaged(framework: str, name: str, how: str, path: Path) -> tuple[str, str] | None:
    method = METHODS[name]
    run = partial(train, framework, method, method.typical[0], Options("adamw"))
    saved = Checkpoint(path, AT)
    run(save=saved)
    dist.barrier()
    if os.environ["RANK"] == "0":
        damage(framework, saved.first.path, how)
    dist.barrier()
    return raised(lambda: run(resume=saved.first))


@pytest.mark.parametrize("framework", CASES)
def test_a_damaged_part_is_refused_on_all_ranks(framework: str, tmp_path: Path) -> None:
    cases = {
        (name, how): partial(resume_damaged, framework, name, how, tmp_path / f"{name} {how}")
        for name, how in CASES[framework]
    }
    outcomes = launch_cases(cases, 2, init=False)
    file = "pipesync_1.bin" if framework == "accelerate" else "'pipesync'"
    for name, how in cases:
        words = ("is damaged: ", "is not what was written") if how == "disk" else ("state of rank 1", "damaged", file)
        for outcome in outcomes[name, how]:
            assert_raised(outcome, "ValueError", *words)
