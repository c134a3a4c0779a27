"""A drill: which faults strike which trainings, that each is proved, and what the verdict is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.lab.drill.case import FRAMEWORKS, Case, Strike, draw, frameworks_of, schedule
from lightning_pipesync.lab.drill.command import Drill
from lightning_pipesync.lab.drill.faults import FAULTS, JOBS, RANKS, SUBJECTS
from lightning_pipesync.lab.drill.phases import PHASES, PHASES_OF_JOBS
from lightning_pipesync.lab.drill.report import as_markdown
from lightning_pipesync.lab.drill.report import draw as draw_picture
from lightning_pipesync.lab.drill.subject import Job
from lightning_pipesync.lab.drill.supervisor import record_of
from lightning_pipesync.lab.drill.verdict import ENDED, FAILED, NOT_FIRED, SURVIVED, Fate, Verdict, judge
from lightning_pipesync.training.registry import METHODS


def whole_schedule(seed: int, number: int) -> list[Case]:
    """Of all methods, also those that other tests have registered."""
    return schedule(seed, number, list(METHODS), list(FRAMEWORKS), list(FAULTS))


def test_a_schedule_is_that_of_its_seed_and_has_everything() -> None:
    cases = whole_schedule(3, 3000)
    assert cases == whole_schedule(3, 3000)
    assert [draw(case.seed) for case in cases] == cases
    assert {(case.subject, case.method, case.framework) for case in cases} == {
        (subject, method, framework)
        for subject in SUBJECTS
        for method in METHODS
        for framework in frameworks_of(method, subject)
    }
    assert {(case.subject, strike.fault, strike.phase) for case in cases for strike in case.strikes} == {
        (subject, name, phase)
        for name, fault in FAULTS.items()
        for subject in fault.subjects
        for phase in phases_of(fault, subject)
    }
    assert all(strike.rank < case.ranks for case in cases for strike in case.strikes)
    assert any(len(case.strikes) == 2 for case in cases)
    assert all(len({strike.rank for strike in case.strikes}) == len(case.strikes) for case in cases)
    assert {case.ranks % 2 for case in cases if case.fault == "partition" and case.subject == RANKS} == {0}
    again = {strike.fault for case in cases for strike in case.strikes if strike.restarts}
    assert again == {name for name, fault in FAULTS.items() if fault.ends_job}


def phases_of(fault: Any, subject: str) -> tuple[str, ...]:
    return PHASES_OF_JOBS if subject == JOBS and fault.phases == PHASES else fault.phases


def test_a_schedule_has_only_what_is_asked_for() -> None:
    one = next(iter(METHODS))
    cases = schedule(0, 20, methods=[one], frameworks=["plain"], faults=["kill", "freeze"])
    assert len(cases) == 20
    assert {(case.method, case.framework) for case in cases} == {(one, "plain")}
    assert {strike.fault for case in cases for strike in case.strikes} == {"kill", "freeze"}
    assert Case.from_json(json.loads(json.dumps(cases[0].to_json()))) == cases[0]
    of_jobs = schedule(0, 5, list(METHODS), ["plain"], ["kill"], subjects=[JOBS])
    assert {(case.subject, case.framework, case.fault) for case in of_jobs} == {(JOBS, "plain", "kill")}


# --- verdicts -------------------------------------------------------------------------------------------------------

RIGHT = {"weights": "a", "finite": True}
WRONG = {"weights": "b", "finite": True}


def case_of(*strikes: Strike, ranks: int = 3) -> Case:
    return Case(0, next(iter(METHODS)), 0, "plain", ranks, strikes)


KILL = case_of(Strike("kill", 1, "forward", 4))
PAUSE = case_of(Strike("pause", 1, "forward", 4))
FLIP = case_of(Strike("bitflip", 1, "collective", 4))
FREEZE = case_of(Strike("freeze", 1, "step", 4))
STORE = "The store of the job at 127.0.0.1:1 does not answer: look first at that machine"


def done(rank: int, result: dict[str, Any] = RIGHT, code: int = 0) -> Fate:
    return Fate(rank, result, None, code)


def blames(rank: int, other: int | None, seconds: float = 3.0) -> Fate:
    text = STORE if other is None else f"a first line\nRank {other} (host a, pid 7) is at fault: it has died"
    return Fate(rank, None, ("RuntimeError", text), 1, seconds)


DEAD = Fate(1, None, None, -9)


@pytest.mark.parametrize(
    ("case", "fates", "kind", "why"),
    [
        (PAUSE, [done(0), done(1), done(2)], SURVIVED, "as an undisturbed run"),
        (PAUSE, [done(0), done(1, WRONG), done(2)], FAILED, "different weights"),
        (PAUSE, [done(0, WRONG), done(1, WRONG), done(2, WRONG)], FAILED, "than an undisturbed run"),
        (PAUSE, [blames(0, 1), blames(1, 0), blames(2, 1)], FAILED, "pause passes"),
        (FLIP, [blames(0, 1), blames(1, 1), blames(2, 1)], ENDED, "Rank 1"),
        (FLIP, [done(0, WRONG), done(1, WRONG), done(2, WRONG)], FAILED, "silent"),
        (KILL, [blames(0, 1), DEAD, blames(2, 1)], ENDED, "Rank 1"),
        (KILL, [done(0), DEAD, blames(2, 1)], ENDED, "Rank 1"),
        (KILL, [done(0), DEAD, done(2)], SURVIVED, "without rank 1"),
        (KILL, [done(0, WRONG), DEAD, done(2, WRONG)], FAILED, "silent"),
        (KILL, [blames(0, 1), DEAD, blames(2, 0)], FAILED, "rank 2 names no or a wrong culprit"),
        (KILL, [blames(0, 1), DEAD, blames(2, None)], FAILED, "rank 2 names no or a wrong culprit"),
        (KILL, [blames(0, 1), DEAD, Fate(2, None, ("OSError", "bad"), 1)], FAILED, "OSError: bad"),
        (KILL, [blames(0, 1), DEAD, blames(2, 1, seconds=20.5)], FAILED, "20 s after the fault"),
        (KILL, [blames(0, 1), DEAD, Fate(2, None, None, -9, hung=True)], FAILED, "rank 2 hangs"),
        (KILL, [blames(0, 1), DEAD, done(2, code=-6)], FAILED, "rank 2 crashed"),
        (FREEZE, [blames(0, 1), blames(1, 0), blames(2, 1)], ENDED, "Rank 1"),
        (FREEZE, [blames(0, 1), Fate(1, None, None, -9, hung=True), blames(2, 1)], FAILED, "rank 1 hangs"),
        (case_of(Strike("kill", 0, "step", 4), ranks=2), [replace(DEAD, rank=0), blames(1, None)], ENDED, "store"),
        (
            case_of(Strike("launcher killed", 1, "step", 4), ranks=2),
            [Fate(rank, None, ("RuntimeError", "Rank 0 is at fault: t" + STORE[1:]), 1) for rank in range(2)],
            ENDED,
            "store",
        ),
        (case_of(Strike("kill", 1, "init"), ranks=2), [Fate(0, None, ("E", "timeout"), 1), DEAD], ENDED, "timeout"),
        (case_of(Strike("nan", 0, "forward", 4), ranks=2), [done(0, WRONG), done(1, WRONG)], SURVIVED, "NaN"),
        (
            case_of(Strike("partition", 0, "step", 4), ranks=2),
            [blames(0, 1), blames(1, None)],
            ENDED,
            "Rank 1",
        ),
        (case_of(Strike("partition", 0, "step", 4), ranks=2), [blames(0, 0), blames(1, 0)], FAILED, "rank 0 names"),
    ],
)
def test_verdicts(case: Case, fates: list[Fate], kind: str, why: str) -> None:
    verdict = judge(case, fates, range(len(case.strikes)), [], RIGHT, limit_s=20)
    assert verdict.kind == kind, verdict
    assert why in verdict.why


def test_what_is_not_proved_or_is_left_behind_is_no_success() -> None:
    fates = [done(0), done(1), done(2)]
    assert judge(PAUSE, fates, [], [], RIGHT, 20) == Verdict(
        NOT_FIRED, "no proof of pause on rank 1, forward of step 4"
    )
    assert judge(PAUSE, fates, [0], ["process 7"], RIGHT, 20) == Verdict(FAILED, "left behind: process 7")


def test_two_faults_may_be_named_by_either() -> None:
    case = case_of(Strike("kill", 1, "forward", 4), Strike("freeze", 2, "step", 4))
    fates = [blames(0, 2), DEAD, blames(2, 1)]
    assert judge(case, fates, [0, 1], [], RIGHT, 20).kind == ENDED
    assert judge(case, fates, [0], [], RIGHT, 20).kind == NOT_FIRED
    for ranks, kind in (("1, 2", ENDED), ("0, 1", FAILED)):
        text = f"No rank is known to be at fault (not heard from yet: ranks {ranks}); rank 0 timed out"
        fates[0] = Fate(0, None, ("RuntimeError", text), 1)
        assert judge(case, fates, [0, 1], [], RIGHT, 20).kind == kind


def test_the_report(tmp_path: Path) -> None:
    records = [
        record_of(KILL, Verdict(ENDED, "Rank 1")),
        record_of(replace(KILL, seed=7), Verdict(FAILED, "a | b\nc")),
        record_of(PAUSE, Verdict(SURVIVED, "")),
        record_of(Case(500_000, "local_sgd", 0, "plain", 2, PAUSE.strikes, JOBS), Verdict(SURVIVED, "")),
    ]
    text = as_markdown(records)
    assert "| kill |  | 1 | 1 |  |  |" in text
    assert "| all trainings | 2 | 1 | 1 |  |  |" in text
    assert "| dear | 1 / 1 / 1 |" in text
    assert "| local_sgd, as jobs | 1 / 0 / 0 |" in text
    assert "| 7 | dear | plain | failed | kill of rank 1 of 3 (forward) | a / b c |" in text
    draw_picture(records, tmp_path / "drill.png")
    assert (tmp_path / "drill.png").stat().st_size > 5000


def test_a_training_resumes_from_a_checkpoint_that_all_ranks_have_written(tmp_path: Path) -> None:
    for framework, written in (("plain", "{}.pt"), ("accelerate", "pipesync_{}.bin")):
        job = Job(replace(KILL, framework=framework), tmp_path / framework, timeout_s=1)
        for step, ranks in ((3, range(3)), (6, (0, 2))):
            (job.folder / f"at-{step}").mkdir()
            for rank in ranks:
                (job.folder / f"at-{step}" / written.format(rank)).touch()
        assert [path.name for path in job.checkpoints() if job.has_been_saved(path)] == ["at-3"]


# --- with processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "selsnyc"], "got 'selsnyc'. Did you mean 'selsync'?"),
        (["--frameworks", "torch"], "frameworks must be some of plain, lightning, fabric, accelerate, got 'torch'"),
        (["--kinds", "kil"], "got 'kil'. Did you mean 'kill'?"),
        (["--methods", "ea_pipe", "--frameworks", "fabric"], "frameworks=fabric do not have methods=ea_pipe"),
        (["--subjects", "job"], "subjects must be some of ranks, jobs, got 'job'. Did you mean 'jobs'?"),
        (["--subjects", "jobs", "--methods", "dear"], "do not have methods=dear with subjects=jobs"),
        (["--subjects", "ranks", "--kinds", "lighthouse killed"], "do not strike subjects=ranks"),
        (["--faults", "0"], "faults must be positive, got 0"),
    ],
)
def test_wrong_options_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", *words]) == 2
    assert said in capsys.readouterr().err


def test_faults_strike_and_are_judged(tmp_path: Path) -> None:
    """One of each verdict that a training can have which is as it should be."""
    exact, replicas = "dear", "local_sgd"
    strikes = {
        "ended": (exact, 2, [Strike("kill", 1, "forward", 4)]),
        "torn": (exact, 2, [Strike("torn write", 0, "checkpoint", 4)]),
        "corrupt": (exact, 2, [Strike("corrupt checkpoint", 1, "resume")]),
        "survived": (replicas, 2, [Strike("pause", 1, "step", 4)]),
        "flipped": (exact, 2, [Strike("bitflip", 1, "collective", 4)]),
        "not fired": (exact, 2, [Strike("bitflip", 1, "collective", 4, message=10_000)]),
        "two": (exact, 3, [Strike("kill", 1, "attach"), Strike("error", 2, "attach")]),
    }
    cases = [
        Case(n, method, 0, "plain", ranks, tuple(given)) for n, (method, ranks, given) in enumerate(strikes.values())
    ]
    assert sorted(Drill(out=tmp_path, timeout_s=20, jobs=2)._run_server(cases)) == list(range(len(cases)))
    records = {name: json.loads((tmp_path / "cases" / f"{n}.json").read_text()) for n, name in enumerate(strikes)}

    def verdict_of(name: str) -> str:
        return records[name]["verdict"] + ": " + records[name]["why"]

    assert verdict_of("ended").startswith("ended: RuntimeError: Rank 1 (host ")
    assert records["ended"]["faults"][0]["proof"] == "exit status -9"
    assert records["ended"]["resumed_from"] == "at-3"
    assert verdict_of("torn").startswith("ended: RuntimeError: ")
    assert records["torn"]["faults"][0]["proof"] == "SIGXFSZ at byte 1000 of a file"
    assert records["torn"]["refused"][0].startswith("at-6: ")
    assert records["torn"]["resumed_from"] == "at-3"
    assert verdict_of("corrupt").startswith("ended: at-6: ")
    assert records["corrupt"]["resumed_from"] == "at-3"
    assert verdict_of("survived") == "survived: weights as an undisturbed run"
    assert records["survived"]["faults"][0]["proof"].startswith("state T of process ")
    assert verdict_of("flipped").startswith("ended: RuntimeError: Rank 1 (host ")
    assert "a message from it was damaged on its way to rank 0" in records["flipped"]["why"]
    assert records["flipped"]["settings"]["check_messages"] is True
    assert "check_messages" not in records["ended"]["settings"]
    assert records["flipped"]["resumed_from"] == "at-3"
    assert verdict_of("not fired").startswith("not fired: ")
    assert verdict_of("two").startswith("ended: RuntimeError: ")
    proofs = [strike["proof"] for strike in records["two"]["faults"]]
    assert proofs == ["exit status -9", "KeyError: 'a bug, for the drill'"]
    assert not list((tmp_path / "work").iterdir())


def test_a_drill_goes_on_and_one_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["drill", "--out", str(tmp_path), "--timeout_s", "20"]
    chosen = [*words, "--kinds", "kill", "--methods", "dear", "--frameworks", "plain", "--faults"]
    assert main([*chosen, "1"]) == 0
    assert "drill --replay SEED" in capsys.readouterr().out
    [record] = json.loads((tmp_path / "drill.json").read_text())["results"]
    assert record["verdict"] in (SURVIVED, ENDED)
    earlier = tmp_path / "cases" / f"{record['seed']}.json"
    earlier.write_text(json.dumps({**record, "verdict": FAILED, "why": "an earlier one"}))
    assert main([*chosen, "1"]) == 1, "it is not drilled again"
    assert main([*words[:3], "--timeout_s", "21", "--faults", "1"]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert main([*words, "--replay", str(record["seed"])]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == record["seed"]
