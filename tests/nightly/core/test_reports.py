"""What a user sees of a run: one trace of all ranks, and a table of what each rank has spent its time on."""

from __future__ import annotations

import io
import json
import warnings
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipesync import DeAR, PipeSyncAccelerator, PipeSyncPlugin, StepReport, TraceCallback, step_report
from lightning_pipesync.core.trace import write_merged
from lightning_pipesync.training.rank_times import RankTimes, as_table
from tests.support.accelerate_runs import end as end_accelerator
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, train_loader, trainer

FIRST, NUM_STEPS = 3, 2
CASES = [("dear", FIRST), ("ddp", FIRST), ("dear", 1000)]
TABLE = "Seconds of each rank"


def exported(pid: int, base: int, *events: dict[str, Any]) -> dict[str, Any]:
    """A trace as torch.profiler exports it, of a process and a GPU."""
    track = {"ph": "M", "tid": 0, "ts": 1.0}
    tracks = [
        {**track, "pid": of, "name": name, "args": args}
        for of, label in ((pid, "CPU"), (0, "GPU 0"))
        for name, args in (("process_name", {"name": "python"}), ("process_labels", {"labels": label}))
    ]
    spans = {"ph": "X", "pid": "Spans", "name": "PyTorch Profiler (0)", "ts": 0.0}
    return {"baseTimeNanoseconds": base, "traceEvents": [*tracks, spans, *events]}


def events_in(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_ranks_are_told_apart_and_their_clocks_agree(tmp_path: Path) -> None:
    """Two hosts may give the same ids to their processes, and count from different moments."""
    one = exported(7, 5_000, {"ph": "X", "pid": 7, "tid": 7, "name": "a", "ts": 12.0, "dur": 1.0})
    arrow = {"ph": "s", "pid": 7, "tid": 7, "name": "ac2g", "id": 4, "ts": 10.0}
    two = exported(7, 4_000, arrow, {"ph": "X", "pid": 0, "tid": 1, "name": "b", "ts": 14.0, "dur": 1.0})
    write_merged(tmp_path / "new" / "trace.json", {"ddp": [one, two], "dear": [None, one]})
    events = events_in(tmp_path / "new" / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ranks = ("ddp rank 0", "ddp rank 1", "dear rank 1")
    assert sorted(names.values()) == sorted(f"{rank}{gpu}" for rank in ranks for gpu in ("", ", GPU 0"))
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
    events = events_in(tmp_path / "trace.json")
    threads = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert sorted(threads) == [(7, "thread 7 (python)"), (8, "thread 8 (pipesync-dear)")]


def fit(folder: Path, strategy: str, first_step: int) -> tuple[list[str], str]:
    """Trains 16 batches; returns what was warned of, and what was printed."""
    callbacks = [TraceCallback(folder / f"{strategy} {first_step}.json", first_step, NUM_STEPS), StepReport(table=True)]
    with warnings.catch_warnings(record=True) as said, redirect_stdout(io.StringIO()) as output:
        warnings.simplefilter("always")
        trainer(strategy, 2, folder, callbacks=callbacks, max_epochs=2).fit(Classifier(), train_loader())
    return [str(one.message) for one in said if "no trace" in str(one.message)], output.getvalue()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    return launch_cases({case: partial(fit, folder, *case) for case in CASES}, 2, init=False)


@pytest.mark.parametrize("strategy", ["dear", "ddp"])
def test_a_trainer_writes_a_trace_and_a_table_of_its_ranks(strategy: str, trained: Outcomes, folder: Path) -> None:
    assert [warned for warned, _ in trained[strategy, FIRST]] == [[], []]
    assert [TABLE in printed for _, printed in trained[strategy, FIRST]] == [True, False]
    events = events_in(folder / f"{strategy} {FIRST}.json")
    ranks = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert sorted(ranks) == ["rank 0", "rank 1"]
    for pid in ranks.values():
        own = [event for event in events if event["pid"] == pid]
        assert sum(event["name"].startswith("ProfilerStep#") for event in own) == NUM_STEPS
        threads = {event["args"]["name"]: event["tid"] for event in own if event["name"] == "thread_name"}
        communicating = [tid for name, tid in threads.items() if "pipesync-dear" in name]
        names = {event["name"] for event in own if event["tid"] in communicating}
        assert bool(communicating) == (strategy == "dear"), threads
        assert ("pipesync::reduce_scatter bucket 0 start" in names) == bool(communicating), names


def test_too_short_a_training_says_that_there_is_no_trace(trained: Outcomes, folder: Path) -> None:
    (first, _), (second, _) = trained["dear", 1000]
    assert first == ["The training had no batch after first_step=1000: no trace was written."]
    assert second == []
    assert not (folder / "dear 1000.json").exists()


@pytest.mark.parametrize("wrong", [{"first_step": 0}, {"num_steps": -1}])
def test_wrong_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(first_step|num_steps) must be positive, got (0|-1)"):
        TraceCallback(**wrong)


def test_who_computes_for_longer_is_slow_and_what_nobody_counts_is_no_number() -> None:
    fast, slow = RankTimes(10.0, 6.0, 3.0, "host a"), RankTimes(10.0, 1.0, 2.25, "host b")
    assert as_table([fast, slow, fast]).splitlines() == [
        TABLE,
        "rank  host    computing  of median  waiting   %  MiB sent",
        "0     host a        4.0        1.0      6.0  60       3.0",
        "1     host b        9.0        2.2      1.0  10       2.2  slow",
        "2     host a        4.0        1.0      6.0  60       3.0",
    ]
    assert as_table([RankTimes(1.0, host="host"), RankTimes(1.5, host="host")]).splitlines()[2:] == [
        "0     host        1.0        1.0        -  -         -",
        "1     host        1.5        1.5        -  -         -  slow",
    ]


def in_a_loop(fails: bool) -> str:
    model, output = nn.Linear(4, 2), io.StringIO()
    sync = DeAR(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with redirect_stdout(output), suppress(ZeroDivisionError), step_report(sync):
        model(torch.randn(3, 4)).sum().backward()
        sync.step()
        if fails:
            raise ZeroDivisionError
    sync.detach()
    return output.getvalue()


def with_accelerate(plugin: PipeSyncPlugin | None) -> str:
    output, accelerator, model = io.StringIO(), PipeSyncAccelerator(plugin), nn.Linear(4, 2)
    with redirect_stdout(output), step_report(accelerator):
        network, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(network(torch.randn(3, 4)).sum())
        optimizer.step()
    end_accelerator(accelerator)
    return output.getvalue()


def test_loops_print_the_table_on_rank_0() -> None:
    """An error is not held up by one."""
    cases: dict[str, Any] = {"loop": partial(in_a_loop, False), "fails": partial(in_a_loop, True)}
    cases |= {"dear": partial(with_accelerate, PipeSyncPlugin("dear")), "none": partial(with_accelerate, None)}
    outcomes = launch_cases(cases, 2)
    for name in cases:
        first, second = outcomes[name]
        assert (TABLE in first) == (name != "fails")
        assert second == ""
