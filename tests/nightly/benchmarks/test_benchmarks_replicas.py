"""What `python -m benchmarks.replicas` compares, and how it is shown."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.churn.emulated_replica import take_steps
from benchmarks.replicas import ALONE, Meeting, Replicas
from tests.support.harness import free_port, on_ranks

TINY: dict[str, Any] = {"mib": 0.1, "step_ms": 1.0, "period": 4, "overlap_steps": 1, "periods": 1, "rounds": 1}


def measure(folder: Path) -> tuple[list[dict[str, Any]], dict[str, list[Tensor]]]:
    """Returns the results, and the weights by candidate after two rounds of replicas whose gradients differ."""
    meeting = Meeting(*next(dist.rendezvous("env://", timeout=timedelta(seconds=60))))
    weights = {}
    benchmark = Replicas(**TINY, output=folder)
    for name in (ALONE, "torchft DiLoCo", "local_sgd"):
        with benchmark.training(name, meeting) as (model, update):
            take_steps(model, update, 2 * benchmark.period, gradient=1.0 + meeting.rank)
            weights[name] = [parameter.detach().clone() for parameter in model.parameters()]
    os.environ["MASTER_PORT"] = str(meeting.gather(free_port())[0])
    results = benchmark.results()
    meeting.end()
    return results, weights


def test_candidates_do_the_same_and_have_a_row_each(tmp_path: Path) -> None:
    (results, weights), (none, others) = on_ranks(measure, 2, tmp_path, init=False)
    assert not none
    assert not torch.equal(weights[ALONE][0], others[ALONE][0])
    for name in ("torchft DiLoCo", "local_sgd"):
        for own, other, same in zip(weights[name], others[name], weights["local_sgd"], strict=True):
            assert torch.equal(own, other), name
            torch.testing.assert_close(own, same)  # another order of the sums
            assert not torch.equal(own, torch.ones_like(own)), name
    text = Replicas(**TINY, output=tmp_path).write(results)
    assert "### 2 replicas of 0.1 MiB" in text
    for name in Replicas(**TINY).candidates:
        assert f"| {name} |" in text
    assert (tmp_path / "replicas.json").exists()


class Late:
    """A store; what is asked of it is asked half a second later."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        time.sleep(0.5)
        return getattr(self._store, name)


def gather_late() -> list[int]:
    """Returns what the ranks have gathered, of which all but the first are late."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
    meeting = Meeting(Late(store) if rank else store, rank, size)
    del store  # the first one's ends with the meeting
    gathered = meeting.gather(rank)
    meeting.end()
    return gathered


def test_the_first_replica_ends_last() -> None:
    """Its process has the store."""
    assert on_ranks(gather_late, 2, init=False) == [[0, 1]] * 2


def test_without_a_launcher_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="pipesync netlab --hosts 2"):
        Replicas().results()


def test_streaming_is_what_torchft_has_too() -> None:
    with pytest.raises(ValueError, match="fragments=3 must divide period=8"):
        Replicas(fragments=3)
    with pytest.raises(ValueError, match="overlap_steps=4 must be shorter"):
        Replicas(overlap_steps=4)
