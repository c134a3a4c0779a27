"""What became of replicas that are jobs of their own, when faults have struck some: a verdict, without processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.drill.case import Case
from tests.drill.verdict import ENDED, FAILED, NOT_FIRED, SURVIVED, Fate, Verdict

#: What jobs say that find too few to begin with.
TOO_FEW = "Training begins with num_replicas="
#: Rounds after which one that has started again is in.
ROUNDS_TO_GET_IN = 2


@dataclass(frozen=True)
class Seen:
    """What was seen of jobs besides their ends.

    Args:
        expected: the result of a simulation with the same members; None: there is none.
        disagreement: in words, how jobs differ on who took part.
        began: whether they have trained together.
        missed: by job that has started again, how many rounds, but the last, the others had without it meanwhile.
        entered: the jobs that have started again, and were taken in.
    """

    expected: Mapping[str, Any] | None = None
    disagreement: str | None = None
    began: bool = True
    missed: Mapping[int, int] | None = None
    entered: Collection[int] = ()


def judge_jobs(
    case: Case, fates: Sequence[Fate], proofs: Collection[int], left_behind: Sequence[str], seen: Seen, limit_s: float
) -> Verdict:
    """Returns what became of jobs; arguments as of :func:`judge`."""
    if missing := [str(strike) for number, strike in enumerate(case.strikes) if number not in proofs]:
        return Verdict(NOT_FIRED, f"no proof of {' and '.join(missing)}")
    lost = lost_jobs(case)
    others = [fate for fate in fates if fate.rank not in lost]
    if hung := [fate for fate in fates if fate.hung]:
        return Verdict(FAILED, f"job {', '.join(str(fate.rank) for fate in hung)} hangs")
    if left_behind:
        return Verdict(FAILED, f"left behind: {', '.join(left_behind)}")
    for fate in others:
        if fate.code not in (0, 1) or (fate.completed and fate.code):
            return Verdict(FAILED, f"job {fate.rank} crashed: exit status {fate.code}; {fate.last_line}")
        if fate.seconds > limit_s:
            return Verdict(FAILED, f"job {fate.rank} ended {fate.seconds:.0f} s after the fault")
    if seen.disagreement is not None:
        return Verdict(FAILED, f"silent difference: {seen.disagreement}")
    if problem := wrong_results(case, fates, seen.expected):
        return Verdict(FAILED, problem)
    raised = [fate for fate in others if not fate.completed]
    if raised and not seen.began and all(TOO_FEW in fate.says for fate in raised) and len(raised) == len(others):
        return Verdict(ENDED, raised[0].last_line)
    if raised:
        return Verdict(FAILED, f"job {raised[0].rank} ended: {raised[0].last_line}")
    for fate in fates:
        if fate.again and fate.rank not in seen.entered and (seen.missed or {}).get(fate.rank, 0) > ROUNDS_TO_GET_IN:
            return Verdict(FAILED, f"job {fate.rank} has started again, and was not taken in: {fate.last_line}")
    return Verdict(SURVIVED, _how_they_survived(case, seen))


def lost_jobs(case: Case) -> set[int]:
    """Returns the jobs that faults may end: of two halves of the network that without the lighthouse."""
    lost = {strike.rank for strike in case.strikes if not strike.kind.spares}
    if any(strike.kind.divides_evenly for strike in case.strikes):
        lost |= set(first_half(case.ranks))
    return lost


def first_half(jobs: int) -> range:
    """Returns the jobs on the first rack: the lighthouse is on the last host, of an even number."""
    return range((jobs + 2) // 2)


def wrong_results(case: Case, fates: Sequence[Fate], expected: Mapping[str, Any] | None) -> str | None:
    """Returns in words how the weights of jobs that came to their end are not right; None if they are."""
    results = {fate.rank: fate.result for fate in fates if fate.result is not None}
    first = next(iter(results.values()), None)
    if first is None:
        return None
    for rank, result in results.items():
        if result["weights"] != first["weights"]:
            return f"silent difference: jobs {min(results)} and {rank} have different weights"
    if any(strike.fault == "nan" for strike in case.strikes):
        return None
    if not first["finite"]:
        return "silent difference: the weights are not finite"
    if expected is not None and first["weights"] != expected["weights"]:
        return "silent difference: all jobs have other weights than the simulation"
    return None


def _how_they_survived(case: Case, seen: Seen) -> str:
    if any(strike.fault == "nan" for strike in case.strikes):
        text = "all jobs have the same weights, with what the NaN has made of them"
    else:
        text = "weights as in the simulation" if seen.expected is not None else "weights the same in all jobs"
    if lost := sorted(lost_jobs(case).difference(seen.entered)):
        text += f" without job {', '.join(map(str, lost))}"
    if seen.entered:
        text += f"; taken in again: job {', '.join(map(str, sorted(seen.entered)))}"
    return text
