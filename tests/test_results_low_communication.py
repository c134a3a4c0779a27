"""Tables and picture of the frontier of low communication, from made-up trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.results.exhibit import Table
from benchmarks.results.job import Record
from benchmarks.results.papers import PICTURES, TABLES
from tests.bench_runs import assert_pictures

#: Of each method: the perplexity, the MiB of a training, and its seconds after 10 and 20 steps.
TRAININGS = {
    "ddp": (4.0, 120.0, (4.0, 8.0)),
    "dear:low_rank=4": (4.1, 12.0, (2.0, 4.0)),
    "sparseloco": (4.5, 0.1, (1.0, 3.0)),
}


def record(task: str, alone: bool = False) -> Record:
    trainings = TRAININGS | ({"alone": (9.0, 0.0, (1.0, 2.0))} if alone else {})
    runs = [
        {"method": name, "seed": seed, "lssr": None, "points": points(quality + 0.1 * seed, *rest)}
        for seed in (0, 1)
        for name, (quality, *rest) in trainings.items()
    ]
    about = {"metric": "perplexity", "higher_is_better": False, "target": 5.0, "world_size": 4, "rate": None}
    return Record("job", "command", "kind", {}, [{"settings": {"task": task}, "runs": runs, **about}])


def points(quality: float, mib: float, seconds: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"steps": 10 * (i + 1), "seconds": when, "quality": quality, "spread": None, "mib": mib * (i + 1) / 2}
        for i, when in enumerate(seconds)
    ]


def text_of(name: str, records: list[Record]) -> str:
    shown = TABLES[name]
    assert isinstance(shown, Table)
    return shown.render(records)


def test_quality_has_the_bytes_of_a_whole_training() -> None:
    text = text_of("low_communication_topics", [record("topics"), record("tiny_llama")])
    assert "**topics, 4 hosts, 20 steps**" in text
    assert "**tiny_llama, 4 hosts, 20 steps**" in text
    assert "| DDP | 4.05 ± 0.64 | +0.00 ± 0.00 | 4.05 ± 0.64 | 120.00 | 1 |" in text
    assert "| DeAR, ACP-SGD, rank 4 | 4.15 ± 0.64 | -0.10 ± 0.00 | 4.15 ± 0.64 | 12.00 | 10 |" in text
    assert "| 0.10 | 1200 |" in text


@pytest.mark.parametrize("name", ["low_communication_time", "low_communication_wan"])
def test_rounds_have_their_share_of_a_step(name: str) -> None:
    """The ten steps of SparseLoCo with a round take twice as long as those without."""
    text = text_of(name, [record("topics", alone=True)])
    assert "| DDP | 400 | 1.0 | 25% |" in text
    assert "| SparseLoCo, period=30 | 150 | 2.7 | 67% |" in text
    assert "alone" not in text


def test_the_picture(tmp_path: Path) -> None:
    tasks = ["topics", "tiny_llama", "topics_muon", "words", "topics"]
    PICTURES["low_communication"].draw([record(task) for task in tasks], tmp_path / "front.png")
    assert_pictures(tmp_path, "front")
