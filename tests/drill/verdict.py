"""What became of a training that faults have struck: a verdict from what was seen, without processes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.drill.case import Case, Strike
from tests.drill.phases import UNWATCHED

SURVIVED, ENDED, FAILED, NOT_FIRED, SKIPPED = "survived", "ended", "failed", "not fired", "skipped"
#: All verdicts, the best first.
VERDICTS = (SURVIVED, ENDED, FAILED, NOT_FIRED, SKIPPED)

_NAMED = re.compile(r"Rank (\d+)(?: \(host [^)]*\))? (?:is at fault|cannot train)")
_MISSED = re.compile(r"not heard from yet: ranks ([\d, ]+)")
_STORE = "he store of the job"


@dataclass(frozen=True)
class Fate:
    """How a rank ended.

    Args:
        rank: which.
        result: what its training has returned; None if it did not come to its end.
        error: type and message of what it has raised.
        code: the exit status of its process; negative for a signal.
        seconds: from the last fault to its end.
        hung: whether it had to be killed.
        again: whether it has taken the place of one that had ended.
        output: what it has printed last.
    """

    rank: int
    result: Mapping[str, Any] | None = None
    error: tuple[str, str] | None = None
    code: int | None = 0
    seconds: float = 0.0
    hung: bool = False
    output: str = ""
    again: bool = False

    @property
    def completed(self) -> bool:
        return self.result is not None

    @property
    def last_line(self) -> str:
        """The last line of its error; of what it has printed, if that names a rank, or if it has died."""
        lines = [line.strip() for line in self.says.splitlines() if line.strip()]
        naming = [line for line in lines if _NAMED.search(line) or _STORE in line]
        if self.completed or not lines:
            return f"exit status {self.code}"
        return (naming or lines)[-1][:500]

    @property
    def says(self) -> str:
        """What it has printed, and its error: the line that names a rank may be added when that ends the script."""
        return self.output if self.error is None else f"{self.output}\n{': '.join(self.error)}"


@dataclass(frozen=True)
class Verdict:
    """One of :data:`VERDICTS`, and why."""

    kind: str
    why: str


def judge(
    case: Case,
    fates: Sequence[Fate],
    proofs: Collection[int],
    left_behind: Sequence[str],
    reference: Mapping[str, Any],
    limit_s: float,
) -> Verdict:
    """Returns what became of the run, before it is resumed; :data:`ENDED` is on condition that it can be.

    Args:
        case: the training and its faults.
        fates: of all ranks.
        proofs: the numbers of the faults that are proved to have happened.
        left_behind: what was there after all had ended, in words.
        reference: what an undisturbed run has returned.
        limit_s: seconds that survivors have to end.
    """
    if missing := [str(strike) for number, strike in enumerate(case.strikes) if number not in proofs]:
        return Verdict(NOT_FIRED, f"no proof of {' and '.join(missing)}")
    lost = {strike.rank for strike in case.strikes if not strike.kind.spares}
    must_end = {strike.rank for strike in case.strikes if strike.kind.ends_victim}
    others = [fate for fate in fates if fate.rank not in lost]
    if hung := [fate.rank for fate in fates if fate.hung and (fate.rank not in lost or fate.rank in must_end)]:
        return Verdict(FAILED, f"rank {', '.join(map(str, hung))} hangs")
    if left_behind:
        return Verdict(FAILED, f"left behind: {', '.join(left_behind)}")
    for fate in others:
        if fate.code not in (0, 1, 143) or (fate.completed and fate.code):
            return Verdict(FAILED, f"rank {fate.rank} crashed: exit status {fate.code}; {fate.last_line}")
    completed = [fate for fate in fates if fate.completed]
    if problem := wrong_weights(case, completed, reference):
        return Verdict(FAILED, problem)
    raised = [fate for fate in others if not fate.completed]
    if not raised and others:
        return Verdict(SURVIVED, _how_they_survived(case, lost))
    passing = [strike.fault for strike in case.strikes if strike.kind.must_survive]
    if len(passing) == len(case.strikes):
        return Verdict(FAILED, f"ended, though {passing[0]} passes: {raised[0].last_line}")
    for fate in raised:
        if fate.seconds > limit_s:
            return Verdict(FAILED, f"rank {fate.rank} ended {fate.seconds:.0f} s after the fault")
        if not names_culprit(case, fate):
            return Verdict(FAILED, f"rank {fate.rank} names no or a wrong culprit: {fate.last_line}")
    return Verdict(ENDED, raised[0].last_line if raised else "all ranks were struck")


def wrong_weights(case: Case, completed: Sequence[Fate], reference: Mapping[str, Any] | None) -> str | None:
    """Returns in words how the weights of ranks that came to their end are not right; None if they are."""
    results = [fate.result for fate in completed if fate.result is not None]
    if not results:
        return None
    if any(result["weights"] != results[0]["weights"] for result in results):
        return "silent difference: ranks have different weights"
    if any(strike.fault == "nan" for strike in case.strikes):
        return None  # it is in the data: the others get it, or not, as an undisturbed run would
    if not results[0]["finite"]:
        return "silent difference: the weights are not finite"
    if case.repeatable and reference is not None and results[0]["weights"] != reference["weights"]:
        return "silent difference: all ranks have other weights than an undisturbed run"
    return None


def names_culprit(case: Case, fate: Fate) -> bool:
    """Returns whether a rank that has raised names a rank that was struck, where something watches over it."""
    if any(strike.phase in UNWATCHED for strike in case.strikes):
        return True
    kind, message = "" if fate.error is None else fate.error[0], fate.says
    if any(re.search(strike.kind.own_error, message) for strike in case.strikes):
        return True
    if any(strike.fault == "terminate" for strike in case.strikes) and kind == "SIGTERMException":
        return True  # a Trainer ends on all ranks, in order
    missed = [rank for ranks in _MISSED.findall(message) for rank in ranks.split(",")]
    named = {int(rank) for rank in [*_NAMED.findall(message), *missed]}
    allowed = {rank for strike in case.strikes for rank in strike.kind.culprits(strike.rank, fate.rank, case.ranks)}
    if _STORE in message and any(_takes_store(strike, fate.rank) for strike in case.strikes):
        return named <= {0, *allowed}
    return bool(named) and named <= allowed


def _takes_store(strike: Strike, rank: int) -> bool:
    """Returns whether a fault may keep ``rank`` from the store of the job, which rank 0 or a launcher runs."""
    cut_off = strike.kind.emulates and (strike.rank == rank or strike.kind.divides_evenly)
    return strike.rank == 0 or strike.kind.of_launcher or cut_off


def _how_they_survived(case: Case, lost: Collection[int]) -> str:
    without = f" without rank {', '.join(map(str, sorted(lost)))}" if lost else ""
    if any(strike.fault == "nan" for strike in case.strikes):
        return f"all ranks have the same weights, with what the NaN has made of them{without}"
    compared = "as an undisturbed run" if case.repeatable else "the same on all ranks"
    return f"weights {compared}{without}"
