"""What a plan advises, by measured numbers, and how it says so."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.core.cluster import BackendCost, Cluster
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.work import Work
from lightning_pipesync.lab.plan.picture import draw
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.text import WIDTH, milliseconds, rate, round_rate
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import slow_ranks
from lightning_pipesync.methods.laboratory import Prediction
from tests.nightly.lab.test_plan import MIB, PROFILE, WORK, cluster

# --- the verdict ------------------------------------------------------------------------------------------------------

DDP = Prediction("ddp", {"bucket_mb": 8.0}, 0.2)
DEAR = Prediction("dear", {"bucket_mb": 1.0}, 0.1)
LARGER = Prediction("dear", {"bucket_mb": 4.0}, 0.12)
DEFAULT = Prediction("ddp", {"bucket_mb": 25.0}, 0.3)
LOCAL = Prediction("local_sgd", {"period": 4}, 0.01, exact=False)
FRAGMENTS = Prediction("local_sgd", {"period": 4, "fragments": 4}, 0.005, exact=False)
ALL = [DDP, DEFAULT, DEAR, LARGER, LOCAL, FRAGMENTS]


def outcomes(measured: list[tuple[Prediction, Any]]) -> dict[str, dict[str, Any]]:
    return {
        one.name: {"error": found} if isinstance(found, str) else {"seconds": found, "resident_bytes": MIB}
        for one, found in measured
    }


@pytest.mark.parametrize(
    ("measured", "advice", "exact", "other"),
    [
        (
            [(DDP, [0.2, 0.21, 0.2]), (DEAR, [0.15, 0.15, 0.16]), (LARGER, [0.14, 0.15, 0.14])],
            "Use dear: 140 ms a step, 1.43 times as fast as DDP (measured).",
            LARGER,
            None,
        ),
        (
            [(DDP, [0.2, 0.2, 0.2]), (DEAR, [0.19, 0.19, 0.21]), (LOCAL, [0.3, 0.3, 0.3])],
            "DDP is enough: 200 ms a step (measured). The best beside it, dear, takes 190 ms: not 2% less, or not in "
            "every round.",
            DDP,
            None,
        ),
        (
            [(DDP, [0.2, 0.2]), (DEAR, [0.199, 0.199])],
            "DDP is enough: 200 ms a step (measured). The best beside it, dear, takes 199 ms: not 2% less, or not in "
            "every round.",
            DDP,
            None,
        ),
        (
            [(DDP, [0.102, 0.102]), (DEAR, [0.11, 0.11])],
            "DDP is enough: 102 ms a step (measured). It waits for the network for 2% of that.",
            DDP,
            None,
        ),
        (
            [(DDP, [0.2]), (DEAR, [0.3]), (LOCAL, [0.05]), (FRAGMENTS, "ValueError: fragments")],
            "Of exact methods DDP is enough: 200 ms a step (measured). The best beside it, dear, takes 300 ms. Not "
            "exact, and faster: local_sgd, 50 ms a step, 4 times as fast as DDP.",
            DDP,
            LOCAL,
        ),
        (
            [(DDP, [0.2]), (DEAR, [0.1]), (LOCAL, [0.11])],
            "Use dear: 100 ms a step, 2 times as fast as DDP (measured).",
            DEAR,
            None,
        ),
        (
            [(DDP, "AttributeError: no"), (DEAR, [0.1]), (LOCAL, [0.01])],
            "No advice: DDP could not be run (AttributeError: no), and only what is ahead of it is advised.",
            None,
            None,
        ),
        (
            [(DDP, [0.2]), (DEFAULT, [0.15]), (DEAR, [0.17])],
            "DDP is enough: 150 ms a step (measured). The best beside it, dear, takes 170 ms.",
            DEFAULT,
            None,
        ),
        (
            [(DDP, "RuntimeError: buckets"), (DEFAULT, [0.2]), (DEAR, [0.1])],
            "Use dear: 100 ms a step, 2 times as fast as DDP (measured).",
            DEAR,
            None,
        ),
        ([(DDP, [0.2])], "DDP is enough: 200 ms a step (measured). Nothing else could be run.", DDP, None),
        (
            [],
            "Try dear: 100 ms a step, 2 times as fast as DDP (predicted; nothing was run). Not exact, and faster: "
            "local_sgd, 5.0 ms a step, 40 times as fast as DDP.",
            DEAR,
            FRAGMENTS,
        ),
    ],
)
def test_nothing_is_advised_that_is_not_ahead_of_measured_ddp(
    measured: list[tuple[Prediction, Any]], advice: str, exact: Prediction | None, other: Prediction | None
) -> None:
    """Predictions count only where nothing was run: all of the others are predicted to be faster than DDP."""
    verdict = verdict_of(ALL, outcomes(measured), computation=0.1)
    assert " ".join(verdict.sentences) == advice
    assert (verdict.exact, verdict.other) == (exact, other)


@pytest.mark.parametrize(("error", "exact"), [(0.05, DEAR.method), (0.11, "ddp")])
def test_a_prediction_counts_if_its_error_is_smaller_than_its_gain(error: float, exact: str) -> None:
    verdict = verdict_of([DDP, replace(DEAR, error=error)], {}, computation=0.1)
    assert verdict.exact is not None
    assert verdict.exact.method == exact
    if exact == "ddp":
        assert verdict.sentences[0] == "Nothing is surely ahead of DDP: 200 ms a step (predicted; nothing was run)."
        assert verdict.sentences[1].endswith("takes 100 ms: not 2% less, or less than costs may be off by.")


# --- the report -------------------------------------------------------------------------------------------------------


def result_of(at: Cluster, measured: dict[str, dict[str, Any]], **changed: Any) -> dict[str, Any]:
    saved = {"settings": {"model": "train:for_plan"}, "world_size": at.world_size, "cluster": asdict(at)}
    return {**saved, "findings": [], "codecs": {}, "changes": [], "measured": measured, **changed}


def report(measured: dict[str, dict[str, Any]], at: Cluster, work: Work = WORK, **changed: Any) -> str:
    text = as_markdown(work, at, result_of(at, measured, **changed))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    return text


def test_the_verdict_comes_first_and_measured_rows_by_what_was_measured() -> None:
    at = cluster(1e8)
    found = sorted(predict(WORK, at), key=lambda one: one.seconds)
    steps = {"ddp": 0.3, "dear": 0.25, "selsync": 0.2, "pipe_sgd": 0.4}
    first = {one.method: one for one in reversed(found)}
    measured = outcomes([(first[method], [seconds]) for method, seconds in steps.items()])
    text = report(measured, at)
    lines = text.splitlines()
    assert lines[0] == "Use dear: 250 ms a step, 1.2 times as fast as DDP (measured)."
    assert lines[1] == "Not exact, and faster: selsync, 200 ms a step, 1.5 times as fast as DDP."
    run, rest = text.split("predicted, not run")
    ranked = [
        line.split()[:3] for line in run.splitlines() if line.startswith(6 * " ") and not line.startswith(7 * " ")
    ]
    assert ranked == [
        ["dear", "250", "1.20"],
        ["ddp", "300", "1.00"],
        ["selsync", "200", "1.50"],
        ["pipe_sgd", "400", "0.75"],
    ]
    assert "local_sgd" in rest, "which is predicted to be faster than all that were run"
    assert "LocalSGD" not in rest
    assert "Trainer(strategy=DeARStrategy(" in text
    assert "Trainer(strategy=SelSyncStrategy(" in text


def test_each_row_has_its_settings() -> None:
    """At 80 columns, where rows of the same method differ by nothing else."""
    text = report({}, cluster(1e7))
    rows = [one.partition("\n      local_sgd")[0] for one in text.split("\n      local_sgd")[1:]]
    settings = {" ".join(row.partition("\n")[2].split("averages")[0].split()) for row in rows}
    assert len(settings) == len(rows) > 1
    assert any("fragments=4, overlap_steps=4" in one or "compression=int8" in one for one in settings)


def test_what_failed_or_was_refused_is_said_in_full() -> None:
    at, reason = cluster(1e8), "a reason that is longer than a line of a terminal has columns, " * 3
    found = predict(WORK, at)
    dear = next(one for one in found if one.method == "dear")
    names = [f"local_sgd:period={period},fragments=4" for period in (4, 8)]
    refused = replace(WORK, refused=dict.fromkeys(names, "fragments=4 is more than the 2 layers."))
    of_ddp = [(one, f"AttributeError: {reason}") for one in found if one.method == "ddp"]
    measured = outcomes([*of_ddp, (dear, [0.1])])
    text = report(measured, at, refused)
    assert text.startswith("No advice: DDP could not be run")
    said = " ".join(text.split())
    assert said.count(reason.strip()) == 2, "in the verdict, and once for both rows of DDP"
    assert "ddp cannot be used: AttributeError" in said
    assert said.count("local_sgd with fragments=4 cannot be used: fragments=4 is more than the 2 layers.") == 1
    assert "Trainer(" not in text


def test_what_was_not_measured_is_said_to_be_extrapolated() -> None:
    at = cluster(1e8)
    assert "Extrapolated" not in report({}, at)
    for other in (at.with_hosts(64), at.with_bandwidth(25e9 / 8)):
        text = as_markdown(WORK, other, result_of(at, {}))
        assert "Extrapolated from 4 hosts with 800 Mbit/s each. Assumed: " in " ".join(text.split())
        assert "(extrapolated; nothing was run)" in " ".join(text.split())
        assert "    extrapolated, not run" in text
        assert "predicted, not run" not in text


# --- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "text", "rounded"),
    [
        (2.18e12, "2.18 Tbit/s", "2 Tbit/s"),
        (1e11, "100 Gbit/s", "100 Gbit/s"),
        (9.43e9, "9.43 Gbit/s", "9 Gbit/s"),
        (9.996e8, "1 Gbit/s", "1 Gbit/s"),
        (191e6, "191 Mbit/s", "200 Mbit/s"),
        (1.4e9, "1.4 Gbit/s", "1.5 Gbit/s"),
    ],
)
def test_rates_are_as_a_person_writes_them(bits: float, text: str, rounded: str) -> None:
    assert rate(bits / 8) == text
    assert round_rate(bits / 8) == rounded


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.3834, "383 ms"), (0.0241, "24 ms"), (0.0099, "9.9 ms"), (0.00042, "0.42 ms")]
)
def test_times_have_digits_that_matter(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("own", "usual", "step", "named"),
    [(0.005, 0.004, 0.005, 0), (0.2, 0.1, 0.25, 1), (0.024, 0.02, 0.4, 0), (0.12, 0.1, 1.0, 0), (0.02, 0.01, 0.02, 1)],
)
def test_a_rank_is_slow_if_it_matters(own: float, usual: float, step: float, named: int) -> None:
    """Some milliseconds are noise, and a small part of a step is not worth a word."""
    works = [Work(replace(PROFILE, forward=seconds, backward=0.0, update=0.0)) for seconds in (usual, usual, own)]
    assert len(slow_ranks(works, list("abc"), step)) == named


# --- many hosts, and the picture --------------------------------------------------------------------------------------


def test_ddp_on_many_hosts_is_not_in_a_flat_ring() -> None:
    """Among as many ranks as were measured it is as measured, and then the faster of two algorithms."""
    backend = BackendCost(1e-3, 1e-9, world_size=4, ratios=[(1.0, 2.0), (1e9, 2.0)])
    ring = LinkCost(1e-3, 1e-9)
    assert backend.all_reduce(MIB, 4) == pytest.approx(2 * ring.all_reduce(MIB, 4))
    assert backend.all_reduce(MIB, 4096) == pytest.approx(2 * (12e-3 + MIB * 1e-9))
    assert [backend.chosen(MIB, hosts) for hosts in (4, 2, 4096)] == ["measured", "ring", "tree"]
    assert backend.chosen(2**34, 64) == "ring", "whose latency hardly counts, and which sends fewer bytes"
    gloo = replace(backend, ring_up_to=16)
    assert gloo.all_reduce(MIB, 16) == pytest.approx(ring.all_reduce(MIB, 16))
    assert gloo.all_reduce(MIB, 17) < 0.5 * ring.all_reduce(MIB, 17)
    for algorithm, expected in (("ring", ring.all_reduce), ("tree", ring.double_tree)):
        assert replace(gloo, algorithm=algorithm).all_reduce(MIB, 8) == expected(MIB, 8)
        assert replace(gloo, algorithm=algorithm).all_reduce(MIB, 4) == backend.all_reduce(MIB, 4)


def test_few_bytes_among_many_hosts_gain_on_a_tree() -> None:
    """Where messages are all that counts, both are on a tree, and no method gains by a ring of DDP's."""
    profile = replace(PROFILE, tensors=[replace(one, num_bytes=2**13) for one in PROFILE.tensors])
    backend = BackendCost(1e-3, 1e-9, world_size=4)
    at = replace(cluster(1e9, 4096), backend=backend, halves=LinkCost(1e-3, 1e-9))
    found = {one.method: one for one in sorted(predict(Work(profile), at), key=lambda one: -one.seconds)}
    assert found["dear"].settings["topology"] == "tree"
    assert found["dear"].seconds == pytest.approx(found["ddp"].seconds, rel=0.02)
    over_nccl = {one.settings.get("topology") for one in predict(Work(profile), replace(at, has_trees=False))}
    assert "tree" not in over_nccl


@pytest.mark.parametrize(
    ("hosts", "algorithm", "words"),
    [
        (8, "auto", "is a ring, as torch's Gloo always has it (on more than 16 hosts NCCL's is assumed)."),
        (4096, "auto", "is a double binary tree, which is the faster of a ring and a double binary tree here: NCCL"),
        (4096, "ring", "is a ring, as asked for."),
        (8, "tree", "is a double binary tree, as asked for."),
        (4, "auto", "is the measured one."),
    ],
)
def test_the_all_reduce_that_is_assumed_of_ddp_is_named(hosts: int, algorithm: Any, words: str) -> None:
    measured = cluster(1e8)
    at = replace(measured, backend=replace(measured.backend, world_size=4)).with_hosts(hosts).with_bandwidth(2e8)
    text = as_markdown(WORK, at.with_algorithm(algorithm), result_of(measured, {}))
    assert f"DDP's all-reduce {words}" in " ".join(text.split())


@pytest.mark.parametrize("hosts", [4, 64])
def test_the_picture(hosts: int, tmp_path: Path) -> None:
    at = cluster(1e8, alpha_error=1e-5, beta_error=1e-10)
    found = predict(WORK, at)
    measured = outcomes([(one, [one.seconds]) for one in found if one.method in ("ddp", "dear")])
    draw(WORK, at.with_hosts(hosts), result_of(at, measured), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 20_000
