"""What no method can train, and a checkpoint that was damaged, are refused on every rank, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from tests.conformance.cases import PAIRS
from tests.conformance.methods import FRAMEWORKS, METHODS
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, launch, on_ranks, raised

#: What is wrong, and the words that name it; a method's own wrong setting has words of its own.
WORDS: dict[str, tuple[str, ...]] = {
    "wrong setting": (),
    "unknown setting": ("no_such_setting",),
    "different settings": ("timeout_s: rank 0 has 70.0, rank 1 has 71.0",),
    "different models": ("(10, 6)", "(11, 6)"),
    "different optimizers": ("class of the optimizer", "SGD", "AdamW"),
    "different learning rates": ("lr of group 0 of SGD", "0.05", "0.1"),
    "LBFGS": ("LBFGS",),
    "ZeroRedundancyOptimizer": ("ZeroRedundancyOptimizer", "pass the optimizer that it wraps"),
}
OF_OPTIMIZERS = ("different optimizers", "different learning rates")

#: By framework, each method, and how its checkpoint is damaged: the state of rank 1 has changed, the file with it is
#: cut off, or a file that all ranks need has changed on the disk. The first ones of each are quick.
DAMAGED = {
    "lightning": [("dear", "state"), ("local_sgd", "disk"), ("selsync", "state"), ("ea_pipe", "state")],
    "fabric": [("pipe_sgd", "state"), ("selsync", "disk"), ("local_sgd", "state")],
    "accelerate": [("dear", "state"), ("dear", "disk"), ("dear", "cut"), ("selsync", "state"), ("ea_pipe", "state")],
}
SAVED_AT = 3

Row = tuple[str, str, str]  # framework, method, and what is wrong
Outcome = tuple[str, str] | None


def rows(quick: bool) -> list[Row]:
    """Returns what can be wrong: of a pipeline each rank may choose an optimizer where it makes that of its stage.

    In a plain loop it is wrong with all methods, and in each framework with one, in turns, and with a pipeline: what
    refuses it does not depend on the method. A wrong setting is one of the method's own.
    """
    if quick:
        return [(*pair, "wrong setting") for pair in PAIRS]
    found = []
    for framework, name in PAIRS:
        pipeline, place = METHODS[name].pipeline, list(METHODS).index(name) + FRAMEWORKS.index(framework)
        for turn, kind in enumerate(kind for kind in WORDS if kind != "wrong setting"):
            alone = pipeline and framework != "lightning" and kind in OF_OPTIMIZERS
            if not alone and (framework == "plain" or pipeline or (place - turn) % len(METHODS) == 0):
                found.append((framework, name, kind))
    return found


def refused(framework: str, name: str, kind: str) -> Outcome:
    method, rank = METHODS[name], int(os.environ["RANK"])
    settings = method.typical[0]
    given, options = {
        "wrong setting": ({**settings, method.wrong[0]: method.wrong[1]}, Options()),
        "unknown setting": ({**settings, "no_such_setting": 1}, Options()),
        "different settings": ({**settings, "timeout_s": 70.0 + rank}, Options()),
        "different models": (settings, Options(hidden=10 + rank)),
        "different optimizers": (settings, Options("adamw" if rank else "sgd")),
        "different learning rates": (settings, Options(lr_factor=1.0 + rank)),
        "LBFGS": (settings, Options("lbfgs")),
        "ZeroRedundancyOptimizer": (settings, Options("zero")),
    }[kind]
    return raised(lambda: train(framework, method, given, options))


def all_refused(framework: str, of_tier: list[Row]) -> Outcomes:
    cases = {row: partial(refused, *row) for row in of_tier if row[0] == framework}
    return launch_cases(cases, 2, init=framework == "plain", launch=launcher(framework))


def launcher(framework: str) -> Callable[..., list[Any]]:
    """Returns what calls the cases: where nobody tears down what was refused, its watch ends with the processes."""
    return on_ranks if framework in ("plain", "lightning") else launch


def assert_refused_by_name(outcomes: list[Outcome], row: Row) -> None:
    _, name, kind = row
    setting, value = METHODS[name].wrong
    for outcome in outcomes:
        assert outcome is not None
        # A setting that a constructor does not have is Python's own error where it has them as arguments.
        assert outcome[0] == "ValueError" or (outcome[0], kind) == ("TypeError", "unknown setting"), outcome
        assert all(word in outcome[1] for word in WORDS[kind] or (setting, repr(value))), outcome


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
    flip_a_bit((saved if framework == "accelerate" else saved["pipesync"])["ranks"][1])
    torch.save(saved, file)


def resume_damaged(framework: str, name: str, how: str, path: Path) -> Outcome:
    method = METHODS[name]
    run = partial(train, framework, method, method.typical[0], Options("adamw"))
    saved = Checkpoint(path, SAVED_AT)
    run(save=saved)
    dist.barrier()
    if os.environ["RANK"] == "0":
        damage(framework, saved.first.path, how)
    dist.barrier()
    return raised(lambda: run(resume=saved.first))


def assert_damaged_is_refused(framework: str, damaged: list[tuple[str, str]], folder: Path) -> None:
    cases = {one: partial(resume_damaged, framework, *one, folder / " ".join(one)) for one in damaged}
    outcomes = launch_cases(cases, 2, init=False, launch=launcher(framework))
    file = "pipesync_1.bin" if framework == "accelerate" else "'pipesync'"
    for name, how in cases:
        words = ("is damaged: ", "is not what was written") if how == "disk" else ("state of rank 1", "damaged", file)
        for outcome in outcomes[name, how]:
            assert_raised(outcome, "ValueError", *words)
