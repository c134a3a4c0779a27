"""What a plan advises: nothing that is not ahead of the baseline, DDP or HSDP, by steps of both in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_pipesync.lab.plan.predictions import LITTLE, is_baseline
from lightning_pipesync.lab.plan.text import milliseconds
from lightning_pipesync.lab.predictions.entry import Prediction

#: A method that gains less than this share of a step over DDP is not worth a change.
WORTH = 0.02


@dataclass(frozen=True)
class Verdict:
    """What a plan advises, in ``sentences``.

    ``exact`` is the fastest exact method that is ahead of the baseline, or that, or None if there is no advice.
    ``other`` is the fastest method that is not exact, if it is ahead of ``exact``.
    """

    sentences: Sequence[str]
    exact: Prediction | None
    other: Prediction | None = None


def verdict_of(
    predictions: Sequence[Prediction],
    measured: Mapping[str, Mapping[str, Any]],
    computation: float = 0.0,
    extrapolated: bool = False,
) -> Verdict:
    """Returns what is advised.

    ``measured`` are the outcomes of what was run, by name; if there are none, predictions are compared with each other,
    never with measured steps. ``computation`` is the seconds of a step of the baseline without communication. With
    ``extrapolated``, the predictions are for another cluster than the measured one.
    """
    rounds = rounds_of(predictions, measured)
    ddp = fastest_baseline(predictions, rounds)
    shown = next(one.method.upper() for one in predictions if is_baseline(one))
    if ddp is None:
        errors = (measured[one.name]["error"] for one in predictions if is_baseline(one) and one.name in measured)
        error = next(errors, "it was not run")
        return Verdict(
            [f"No advice: {shown} could not be run ({error}), and only what is ahead of it is advised."], None
        )
    usable = [one for one in predictions if one.name in rounds]
    sure = _surely_ahead if measured else _predicted_ahead
    exact = _fastest([one for one in usable if one.exact and sure(one, ddp, rounds)], rounds) or ddp
    other = _fastest([one for one in usable if not one.exact and sure(one, exact, rounds)], rounds)
    predicted = "extrapolated" if extrapolated else "predicted"
    how = "measured" if measured else f"{predicted}; nothing was run"
    times = {one.name: median(rounds[one.name]) for one in (ddp, exact, other) if one is not None}

    def with_gain(one: Prediction) -> str:
        return (
            f"{milliseconds(times[one.name])} a step, {times[ddp.name] / times[one.name]:.3g} times as fast as {shown}"
        )

    if exact is not ddp:
        advice = "Use" if measured else "Try"
        sentences = [f"{advice} {exact.title}: {with_gain(exact)} ({how})."]
    else:
        beside = [one for one in usable if not is_baseline(one) and (other is None or one.exact)]
        waits = 1 - computation / times[ddp.name]
        enough = f"{shown} is enough" if measured or waits <= LITTLE else f"nothing is surely ahead of {shown}"
        enough = enough[0].upper() + enough[1:] if other is None else f"Of exact methods {enough}"
        sentences = [
            f"{enough}: {milliseconds(times[ddp.name])} a step ({how}).",
            f"It waits for the network for {max(0.0, waits):.0%} of that."
            if waits <= LITTLE
            else _beside(_fastest(beside, rounds), rounds, times[ddp.name], bool(measured)),
        ]
    if other is not None:
        sentences.append(f"Not exact, and faster: {other.title}, {with_gain(other)}.")
    return Verdict(sentences, exact, other)


def rounds_of(
    predictions: Sequence[Prediction], measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, Sequence[float]]:
    """Returns by name the seconds of a step in each round of those that were run; if none was, what is predicted."""
    if not measured:
        return {one.name: [one.seconds] for one in predictions}
    return {name: outcome["seconds"] for name, outcome in measured.items() if "seconds" in outcome}


def fastest_baseline(predictions: Sequence[Prediction], rounds: Mapping[str, Sequence[float]]) -> Prediction | None:
    """Returns HSDP, or DDP with its fastest buckets, of those in ``rounds``; None: there is none."""
    return _fastest([one for one in predictions if is_baseline(one) and one.name in rounds], rounds)


def _fastest(found: Sequence[Prediction], rounds: Mapping[str, Sequence[float]]) -> Prediction | None:
    return min(found, key=lambda one: median(rounds[one.name]), default=None)


def _surely_ahead(one: Prediction, other: Prediction, rounds: Mapping[str, Sequence[float]]) -> bool:
    """Returns whether one was ahead of another by more than noise: in all rounds, which were in turns, and by 2 %."""
    seconds, others = rounds[one.name], rounds[other.name]
    return all(a < b for a, b in zip(seconds, others, strict=True)) and median(seconds) < (1 - WORTH) * median(others)


def _predicted_ahead(one: Prediction, other: Prediction, _: Mapping[str, Sequence[float]]) -> bool:
    """Returns whether one is predicted to be ahead of another by 2 %, and by more than the costs' errors."""
    return other.seconds - one.seconds > max(WORTH * other.seconds, one.error, other.error)


def _beside(best: Prediction | None, rounds: Mapping[str, Sequence[float]], ddp: float, measured: bool) -> str:
    """Returns why the best method beside DDP is not advised."""
    if best is None:
        return "Nothing else could be run."
    seconds, why = median(rounds[best.name]), ""
    less = 1 - seconds / ddp
    if less > WORTH:
        why = f", {less:.0%} less, but " + ("not in every round" if measured else "costs may be off by more")
    elif less > 0:
        why = f", not {WORTH:.0%} less"
    return f"The best beside it, {best.title}, takes {milliseconds(seconds)}{why}."
