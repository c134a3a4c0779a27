"""Drills one case: a training that is struck, and whether it can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_pipesync.core.files import replacing
from tests.drill import system
from tests.drill.case import Case
from tests.drill.faults import DAMAGED_BYTES, JOBS
from tests.drill.jobs import Jobs, Told, disagreement, rounds_of, simulated
from tests.drill.scene import RUN_S, Scene
from tests.drill.subject import Job
from tests.drill.verdict import (
    ENDED,
    FAILED,
    NOT_FIRED,
    SKIPPED,
    SURVIVED,
    Fate,
    Verdict,
    judge,
    wrong_weights,
)
from tests.drill.verdict_of_jobs import Seen, judge_jobs, lost_jobs

#: Seconds after which the supervisor itself counts as hung, per run that a case may need.
RUNS_OF_CASE = 6


@dataclass(frozen=True)
class Place:
    """Where a drill writes.

    Args:
        folder: of the drill.
        timeout_s: of methods and process groups.
    """

    folder: Path
    timeout_s: float

    def record_of(self, case: Case) -> Path:
        return self.folder / "cases" / f"{case.seed}.json"

    def reference_of(self, case: Case) -> Path:
        return self.folder / "references" / f"{case.method}-{case.variant}-{case.framework}-{case.ranks}.json"

    def work_of(self, case: Case) -> Path:
        return self.folder / "work" / str(case.seed)


def supervise(case: Case, place: Place) -> None:
    """Drills a case, and writes its record; ends this process."""
    system.die_with_parent()
    system.inherit_orphans()
    signal.alarm(int(RUNS_OF_CASE * (RUN_S + place.timeout_s)))
    begin = time.monotonic()
    try:
        record = drill(case, place)
    except Exception:
        record = record_of(case, Verdict(FAILED, f"the drill itself broke: {traceback.format_exc()}"))
    record["wall_s"] = round(time.monotonic() - begin, 2)
    write_json(place.record_of(case), record)
    shutil.rmtree(place.work_of(case), ignore_errors=True)
    os._exit(0)


def drill(case: Case, place: Place) -> dict[str, Any]:
    """Returns the record of a case."""
    work = place.work_of(case)
    shutil.rmtree(work, ignore_errors=True)
    (work / "tmp").mkdir(parents=True)
    os.environ["TMPDIR"], tempfile.tempdir = str(work / "tmp"), None
    if reason := reason_to_skip(case):
        return record_of(case, Verdict(SKIPPED, reason))
    if case.subject == JOBS:
        return drill_jobs(case, place)
    reference = reference_of(case, place)
    subject = Job(case, work / "checkpoints", place.timeout_s)
    if any(strike.phase == "resume" for strike in case.strikes):
        return drill_resumption(case, place, subject, reference)
    scene = Scene(subject, place.timeout_s, case.strikes)
    scene.run()
    fates, left = fates_of(scene), left_by(scene, work)
    struck = struck_by(case, scene)
    verdict = judge(struck, fates, proofs_of(struck, case, scene), left, reference, scene.limit_s)
    record = record_of(case, verdict, scene, fates)
    if verdict.kind == ENDED:
        for strike in case.strikes:
            strike.kind.repair(scene)
        found = resume(case, place, subject, reference)
        record |= {"resumed_from": found.resumed_from, "refused": found.refused}
        if found.problem is not None:
            record |= {"verdict": FAILED, "why": found.problem}
    return record


def drill_jobs(case: Case, place: Place) -> dict[str, Any]:
    """Returns the record of a case of jobs: those that are left survive, with the weights of a simulation."""
    work = place.work_of(case)
    scene = Scene(Jobs(case, work / "checkpoints", place.timeout_s), place.timeout_s, case.strikes)
    scene.run()
    fates, struck = fates_of(scene), struck_by(case, scene)
    proofs = proofs_of(struck, case, scene)
    verdict = judge_jobs(struck, fates, proofs, left_by(scene, work), seen_of(case, scene), scene.limit_s)
    record = record_of(case, verdict, scene, fates)
    if verdict.kind == ENDED:
        again = Scene(Jobs(case, work / "again", place.timeout_s), place.timeout_s)
        again.run()
        whole = judge_jobs(replace(case, strikes=()), fates_of(again), (), (), seen_of(case, again), again.limit_s)
        record |= {"resumed_from": "the beginning", "refused": ()}
        if whole.kind != SURVIVED:
            record |= {"verdict": FAILED, "why": f"started again: {whole.why}"}
    return record


def seen_of(case: Case, scene: Scene) -> Seen:
    """Returns what those that were not lost have told of their rounds, and what these are to compute."""
    lost, told = lost_jobs(replace(case, strikes=tuple(scene.strikes))), []
    joins: dict[int, int] = {}  # by job that has started again, after how many other rounds it has begun to join
    entered: set[int] = set()
    rounds: set[int] = set()  # of those that were not lost
    ends: set[int] = set()
    for member, event in scene.heard:
        if "joins" in event:
            if member.again:
                joins[member.rank] = len(rounds)
            continue
        counts = member.again or member.rank not in lost
        if counts:
            of, present = tuple(event["of"]), tuple(event["present"])
            left = tuple(event["left"])
            told.append(Told(str(member.rank), event["round"], event["step"], of, present, event["ends"], left))
        if member.again:
            entered.add(member.rank)
        elif counts:
            (ends if event["ends"] else rounds).add(event["round"])
    differs = disagreement(told)
    begin, common = rounds_of(told)
    expected = None
    if case.repeatable and begin and common and differs is None:
        expected = simulated(case, begin, common)
    missed = {rank: len(rounds) - before for rank, before in joins.items()}
    return Seen(expected, differs, bool(common), missed, entered)


def proofs_of(struck: Case, case: Case, scene: Scene) -> list[int]:
    """Returns the numbers, among the faults of ``struck``, of those that are proved."""
    return [number for number, strike in enumerate(struck.strikes) if case.strikes.index(strike) in scene.proofs]


def left_by(scene: Scene, work: Path) -> list[str]:
    left = list(scene.left_behind)
    if all(member.code is not None and member.code >= 0 for member in scene.members):
        # Who is killed cannot remove its files.
        left += [path.name for path in (work / "tmp").rglob("*") if not path.is_dir()]
    return left


def struck_by(case: Case, scene: Scene) -> Case:
    """Returns the case without the faults whose phase has not come any more, as another one has ended the training."""
    reached = tuple(strike for number, strike in enumerate(case.strikes) if number in scene.reached)
    return replace(case, strikes=reached) if reached else case


def reason_to_skip(case: Case) -> str | None:
    if any(strike.kind.emulates for strike in case.strikes):
        from lightning_pipesync.lab.netlab.network import check_requirements

        try:
            check_requirements()
        except (RuntimeError, ModuleNotFoundError) as error:
            return str(error)
    if any(strike.fault == "full disk" for strike in case.strikes) and not system.has_private_mounts():
        return "a small disk needs a mount, and so root"
    return None


def reference_of(case: Case, place: Place) -> dict[str, Any]:
    """Returns what an undisturbed run returns, of this drill or of an earlier case of it."""
    file = place.reference_of(case)
    if not file.exists():
        subject = Job(case, place.work_of(case) / "undisturbed", place.timeout_s)
        scene = Scene(subject, place.timeout_s)
        scene.run()
        fates = fates_of(scene)
        if problem := next((fate.last_line for fate in fates if not fate.completed or fate.code), None):
            raise RuntimeError(f"An undisturbed run fails: {problem}\n{fates[0].output}")
        results = [dict(fate.result or {}) for fate in fates]
        if any(result["weights"] != results[0]["weights"] for result in results):
            raise RuntimeError(f"The ranks of an undisturbed run have different weights: {results}")
        write_json(file, results[0])
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@dataclass(frozen=True)
class Resumption:
    """How a training was resumed: from which checkpoint, which others were refused and how, and what is wrong."""

    resumed_from: str | None = None
    refused: tuple[str, ...] = ()
    problem: str | None = None


def resume(case: Case, place: Place, subject: Job, reference: Mapping[str, Any]) -> Resumption:
    """Resumes from the last checkpoint; from the one before, if all ranks refuse it because a fault has damaged it."""
    refused: list[str] = []
    damaged = any(strike.kind.by_writer or strike.phase == "checkpoint" for strike in case.strikes)
    for checkpoint in [*subject.checkpoints(), None]:
        if checkpoint is not None and not damaged and not subject.has_been_saved(checkpoint):
            continue
        name = "the beginning" if checkpoint is None else checkpoint.path.name
        scene = Scene(subject, place.timeout_s, (), checkpoint)
        scene.run()
        fates = fates_of(scene)
        if scene.hung:
            return Resumption(name, tuple(refused), f"rank {scene.hung[0].rank} hangs when it resumes from {name}")
        if all(fate.completed and fate.code == 0 for fate in fates):
            problem = wrong_weights(case, fates, reference)
            return Resumption(name, tuple(refused), problem and f"resumed from {name}, {problem}")
        error = next(fate.last_line for fate in fates if not fate.completed or fate.code)
        completed = [fate for fate in fates if fate.completed]
        struck = {strike.rank for strike in case.strikes if strike.phase == "resume"}
        if completed and all(fate.completed or fate.rank in struck for fate in fates):  # that rank counts as lost
            refused.append(f"{name}: {error}")
            problem = wrong_weights(case, completed, reference)
            return Resumption(name, tuple(refused), problem and f"resumed from {name}, {problem}")
        if completed:
            return Resumption(name, tuple(refused), f"some ranks resume from {name}, others do not: {error}")
        refused.append(f"{name}: {error}")
        if not damaged or checkpoint is None:
            return Resumption(name, tuple(refused), f"cannot resume from {name}: {error}")
    raise AssertionError("unreachable")


def drill_resumption(case: Case, place: Place, subject: Job, reference: Mapping[str, Any]) -> dict[str, Any]:
    """Damages a checkpoint: all ranks must refuse it, or it does not matter; the one before must do."""
    scene = Scene(subject, place.timeout_s)
    scene.run()
    strike = case.strikes[0]
    newest, last = subject.checkpoints()[:2]  # after the latter there are steps
    file = max(subject.files_of(last, strike.rank), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    start = len(content) // 2
    block = bytes(255 - byte for byte in content[start : start + DAMAGED_BYTES])
    file.write_bytes(content[:start] + block + content[start + len(block) :])
    for member in range(subject.members):
        for one in subject.files_of(newest, member):
            one.unlink()
    found = resume(case, place, subject, reference)
    how = f"{len(block)} bytes from {start} of {len(content)} of {file.name} have other bits"
    if found.problem is not None:
        verdict = Verdict(FAILED, found.problem)
    elif found.refused:
        verdict = Verdict(ENDED, found.refused[0])
    else:
        verdict = Verdict(SURVIVED, "what is damaged does not matter")
    record = record_of(case, verdict)
    record["faults"][0]["proof"] = how
    return record | {"resumed_from": found.resumed_from, "refused": found.refused}


def fates_of(scene: Scene) -> list[Fate]:
    fates = []
    for member in scene.members:
        since = scene.fired_at if member.ended_at is not None else None
        seconds = 0.0 if since is None or member.ended_at is None else max(0.0, member.ended_at - since)
        hung = member in scene.hung
        fates.append(
            Fate(member.rank, member.result, member.error, member.code, seconds, hung, member.output, member.again)
        )
    return fates


def record_of(case: Case, verdict: Verdict, scene: Scene | None = None, fates: Sequence[Fate] = ()) -> dict[str, Any]:
    proofs = {} if scene is None else scene.proofs
    lost = {strike.rank for strike in case.strikes if not strike.kind.spares}
    record: dict[str, Any] = {
        "seed": case.seed,
        "method": case.method,
        "settings": case.settings,
        "framework": case.framework,
        "subject": case.subject,
        "ranks": case.ranks,
        "fault": case.fault,
        "faults": [{**strike, "proof": proofs.get(number)} for number, strike in enumerate(case.to_json()["strikes"])],
        "verdict": verdict.kind,
        "why": verdict.why,
        "seconds": round(max((fate.seconds for fate in fates if fate.rank not in lost), default=0.0), 2),
        "last_lines": {named(fate): fate.last_line for fate in fates},
    }
    if verdict.kind in (FAILED, NOT_FIRED):
        record["outputs"] = {named(fate): fate.output[-6000:] for fate in fates}
    return record


def named(fate: Fate) -> str:
    return f"{fate.rank} again" if fate.again else str(fate.rank)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1) + "\n")
