"""What is said of ranks that do not return, which ranks `on_ranks` keeps, and what no call may leave to the next."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core import parameters
from tests.support.harness import DIED, launch, on_ranks


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def misbehave(how: str) -> None:
    if os.environ["RANK"] == "0":
        return
    if how == "raises":
        raise KeyError("of rank 1")
    if how == "dies":
        os._exit(3)
    time.sleep(1000)


def test_results_are_by_rank() -> None:
    assert launch(sum_of_ranks, 3) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ["rank 1 raised", "KeyError: 'of rank 1'", "in misbehave"]),
        ("dies", ["rank 1 died with exit code 3"]),
    ],
)
def test_a_rank_that_does_not_return_is_named(how: str, words: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        # Without a process group, whose connections rank 0 may still make when rank 1 dies.
        launch(misbehave, 2, how, init=False)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "rank 0" not in str(caught.value)


def test_a_rank_may_be_expected_to_die() -> None:
    assert launch(misbehave, 2, "dies", may_die=(1,), init=False) == [None, DIED]


def test_ranks_are_kept_until_one_fails() -> None:
    first = on_ranks(os.getpid, 2)
    assert on_ranks(os.getpid, 2) == first
    assert on_ranks(sum_of_ranks, 2) == [1.0, 1.0]
    with pytest.raises(AssertionError, match="rank 1 raised"):
        on_ranks(misbehave, 2, "raises")
    assert not any(map(lives, first))
    assert not set(on_ranks(os.getpid, 2)) & set(first)


def leave(what: str) -> None:
    if what == "a thread":
        threading.Thread(target=time.sleep, args=[60], name=what, daemon=True).start()
    else:
        parameters.norm_of_gradients = None  # type: ignore[assignment]


@pytest.mark.parametrize("what", ["a thread", "lightning_pipesync.core.parameters.norm_of_gradients"])
def test_what_a_call_leaves_behind_is_named(what: str) -> None:
    with pytest.raises(AssertionError, match=f"left behind, by rank: .*{what}"):
        on_ranks(leave, 2, what)


def lives(pid: int) -> bool:
    """Whether a process is there, and not only its status, which nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
