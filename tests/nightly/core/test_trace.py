"""One trace of all ranks: a track for each rank and thread, with its name, whichever the training."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync import TraceCallback
from lightning_pipesync.core.trace import write_merged
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, train_loader, trainer

FIRST, NUM_STEPS = 3, 2


def exported(pid: int, base: int, *events: dict[str, Any]) -> dict[str, Any]:
    """A trace as torch.profiler exports it, of a process and a GPU."""
    names = [("process_name", {"name": "python"}), ("process_labels", {"labels": "CPU"})]
    of_gpu = [("process_name", {"name": "python"}), ("process_labels", {"labels": "GPU 0"})]
    tracks = [{"ph": "M", "pid": pid, "tid": 0, "ts": 1.0, "name": name, "args": args} for name, args in names]
    tracks += [{"ph": "M", "pid": 0, "tid": 0, "ts": 1.0, "name": name, "args": args} for name, args in of_gpu]
    spans = {"ph": "X", "pid": "Spans", "name": "PyTorch Profiler (0)", "ts": 0.0}
    return {"baseTimeNanoseconds": base, "traceEvents": [*tracks, spans, *events]}


def test_ranks_are_told_apart_and_their_clocks_agree(tmp_path: Path) -> None:
    """Two hosts may give the same ids to their processes, and count from different moments."""
    one = exported(7, 5_000, {"ph": "X", "pid": 7, "tid": 7, "name": "a", "ts": 12.0, "dur": 1.0})
    arrow = {"ph": "s", "pid": 7, "tid": 7, "name": "ac2g", "id": 4, "ts": 10.0}
    two = exported(7, 4_000, arrow, {"ph": "X", "pid": 0, "tid": 1, "name": "b", "ts": 14.0, "dur": 1.0})
    write_merged(tmp_path / "new" / "trace.json", {"ddp": [one, two], "dear": [None, one]})
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == [
        *("ddp rank 0", "ddp rank 0, GPU 0", "ddp rank 1", "ddp rank 1, GPU 0"),
        *("dear rank 1", "dear rank 1, GPU 0"),
    ]
    times = {(names[event["pid"]], event["name"]): event["ts"] for event in events if "ts" in event}
    assert times == {
        ("ddp rank 0", "a"): 3.0,
        ("ddp rank 1", "ac2g"): 0.0,
        ("ddp rank 1, GPU 0", "b"): 4.0,
        ("dear rank 1", "a"): 0.0,
    }


@pytest.mark.parametrize("order", [1, -1])
def test_a_thread_has_the_name_that_is_its_own(order: int, tmp_path: Path) -> None:
    """And none that has no events, from a profile before."""
    named = [(8, "thread 8 (pipesync-dear)"), (8, "thread 8 (python)"), (7, "thread 7 (python)"), (9, "gone")]
    track = {"ph": "M", "pid": 7, "ts": 1.0, "name": "thread_name"}
    tracks = [{**track, "tid": tid, "args": {"name": name}} for tid, name in named]
    spans = [{"ph": "X", "pid": 7, "tid": tid, "name": "a", "ts": 1.0, "dur": 1.0} for tid in (7, 8)]
    write_merged(tmp_path / "trace.json", {"": [exported(7, 0, *tracks[::order], *spans)]})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert sorted(threads) == [(7, "thread 7 (python)"), (8, "thread 8 (pipesync-dear)")]


def fit(folder: Path, strategy: str, first_step: int) -> list[str]:
    """Trains 16 batches; returns what was warned of."""
    callback = TraceCallback(folder / f"{strategy} {first_step}.json", first_step, NUM_STEPS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(strategy, 2, folder, callbacks=[callback], max_epochs=2).fit(Classifier(), train_loader())
    return [str(one.message) for one in said if "no trace" in str(one.message)]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases = {(strategy, first): partial(fit, folder, strategy, first) for strategy, first in CASES}
    return launch_cases(cases, 2, init=False)


CASES = [("dear", FIRST), ("ddp", FIRST), ("dear", 1000)]


@pytest.mark.parametrize("strategy", ["dear", "ddp"])
def test_a_trainer_writes_a_trace_of_its_ranks(strategy: str, trained: Outcomes, folder: Path) -> None:
    assert trained[strategy, FIRST] == [[], []]
    events = json.loads((folder / f"{strategy} {FIRST}.json").read_text())["traceEvents"]
    ranks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert sorted(ranks) == ["rank 0", "rank 1"]
    for pid in ranks.values():
        own = [event for event in events if event["pid"] == pid]
        assert sum(event["name"].startswith("ProfilerStep#") for event in own) == NUM_STEPS
        threads = {event["args"]["name"]: event["tid"] for event in own if event["name"] == "thread_name"}
        communicating = [tid for name, tid in threads.items() if "pipesync-dear" in name]
        names = {event["name"] for event in own if event["tid"] in communicating}
        if strategy == "dear":
            assert "pipesync::reduce_scatter bucket 0 start" in names
        else:
            assert not communicating


def test_too_short_a_training_says_that_there_is_no_trace(trained: Outcomes, folder: Path) -> None:
    first, second = trained["dear", 1000]
    assert first == ["The training had no batch after first_step=1000: no trace was written."]
    assert second == []
    assert not (folder / "dear 1000.json").exists()


@pytest.mark.parametrize("wrong", [{"first_step": 0}, {"num_steps": -1}])
def test_wrong_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(first_step|num_steps) must be positive, got (0|-1)"):
        TraceCallback(**wrong)
