"""What `python -m benchmarks.replicas` compares, and how it is shown."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.churn.emulated_replica import take_steps
from benchmarks.replicas import ALONE, Meeting, Replicas
from tests.harness import free_port, launch

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
    (results, weights), (none, others) = launch(measure, 2, tmp_path, init=False)
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


def gather_late() -> list[int]:
    meeting = Meeting(*next(dist.rendezvous("env://", timeout=timedelta(seconds=60))))
    read = meeting._store.get

    def get(key: str) -> bytes:
        time.sleep(meeting.rank * 0.5)
        return read(key)

    with patch.object(meeting, "_store", MagicMock(wraps=meeting._store, get=get)):
        gathered = meeting.gather(meeting.rank)
        meeting.end()
    return gathered


def test_the_first_replica_ends_last() -> None:
    """Its process has the store."""
    assert launch(gather_late, 2, init=False) == [[0, 1]] * 2


def test_without_a_launcher_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="pipesync netlab --hosts 2"):
        Replicas().results()


def test_streaming_is_what_torchft_has_too() -> None:
    with pytest.raises(ValueError, match="fragments=3 must divide period=8"):
        Replicas(fragments=3)
    with pytest.raises(ValueError, match="overlap_steps=4 must be shorter"):
        Replicas(overlap_steps=4)
