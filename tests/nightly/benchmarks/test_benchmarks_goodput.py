"""Which steps `python -m benchmarks.goodput` counts of replicas that are killed, and how it is shown."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks.churn.job import KILLED
from benchmarks.churn.log import Line, progress, read, rounds_of, steps_at
from benchmarks.goodput import Goodput
from tests.nightly.benchmarks.bench_runs import assert_pictures

#: A round of two steps, on a machine that may be busy.
TINY = {"replicas": 2, "mib": 0.01, "step_ms": 20.0, "period": 2, "checkpoint_steps": 3}


def lines(pid: int, *events: tuple[str, int]) -> list[Line]:
    return [Line(float(time), pid, event, rounds) for time, (event, rounds) in enumerate(events)]


def test_steps_count_that_a_round_has() -> None:
    one = lines(1, ("start", 0), ("begin", 0), ("step", 0), ("step", 1), ("step", 1), ("step", 2), ("step", 2))
    assert rounds_of(one) == [(3.0, 2), (5.0, 2)]
    again = lines(2, ("begin", 5), ("step", 5), ("step", 6))  # the step after round 2 is lost with its process
    assert rounds_of([*one, *again]) == [(2.0, 2), (3.0, 2), (5.0, 2)]


def test_steps_that_are_repeated_count_once() -> None:
    """As those since DDP's last checkpoint."""
    first = lines(1, ("begin", 0), ("step", 1), ("step", 2), ("step", 3))
    again = [Line(10.0 + line.time, 2, line.event, line.rounds) for line in lines(2, ("begin", 1), ("step", 2))]
    assert rounds_of([*first, *again]) == [(1.0, 1), (3.0, 1), (11.0, 1)]


def test_steps_that_are_undone_or_replaced_do_not_count() -> None:
    undone = lines(1, ("begin", 0), ("step", 0), ("step", 0), ("undone", 0), ("step", 0), ("step", 1))
    assert rounds_of(undone) == [(5.0, 2)]
    healed = lines(1, ("begin", 0), ("step", 0), ("step", 8), ("step", 8), ("step", 9))
    assert rounds_of(healed) == [(4.0, 2)]


def test_progress_is_that_between_two_times() -> None:
    one = lines(1, ("begin", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4))
    points = progress([one, one], begin=1.0, end=3.0)
    assert points == [(0.0, 0), (1.0, 1), (1.0, 2), (2.0, 3), (2.0, 4)]
    assert [steps_at(points, time) for time in (0.0, 0.9, 1.0, 5.0)] == [0, 0, 2, 4]


def test_all_are_killed_in_turn() -> None:
    """The first one, too."""
    victims = list(Goodput(replicas=3, kill_every_s=1, duration_s=8)._victims())
    assert len(victims) == 7
    assert set(victims[:3]) == set(victims[3:6]) == {0, 1, 2}
    assert victims == list(Goodput(replicas=3, kill_every_s=1, duration_s=8)._victims())


def test_torchrun_says_whom_a_signal_has_killed() -> None:
    line = "E1126 api.py:1015] failed (exitcode: {}) local_rank: 1 (pid: 42) of binary: python"
    assert KILLED.findall(line.format(-9)) == ["42"]
    assert KILLED.findall(line.format(-15)) == []


def test_replicas_are_killed_and_go_on(tmp_path: Path) -> None:
    benchmark = Goodput(**TINY, kill_every_s=1.5, duration_s=3.0, output=tmp_path)
    [result] = benchmark.results()
    assert [run["method"] for run in result["runs"]] == ["local_sgd", "torchft DiLoCo", "ddp"]
    for run in result["runs"]:
        [kill] = run["kills"]
        assert steps_at(run["points"], kill["time"]) > 0
        assert 0 < benchmark.goodput(run) < 1
        logs = [read(path) for path in (tmp_path / "goodput" / run["method"].replace(" ", "_")).glob("*.jsonl")]
        assert len(logs) == 2
    for run in result["runs"][:2]:
        [of_job] = run["job"]["kills"]
        assert [(one["pid"], one["status"]) for one in run["job"]["exits"]] == [(of_job["pid"], -signal.SIGKILL)]
    text = benchmark.write([result])
    assert "### 2 replicas, a kill each 1.5 s" in text
    assert "| torchft DiLoCo | 1 |" in text
    assert_pictures(tmp_path, "goodput")
    assert json.loads((tmp_path / "goodput.json").read_text())["results"] == json.loads(json.dumps([result]))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'fsdp' is not known"):
        Goodput(methods=("fsdp",))
    with pytest.raises(ValueError, match="duration_s=30 must be at least twice kill_every_s=30"):
        Goodput(duration_s=30)
