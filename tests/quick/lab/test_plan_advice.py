"""What a plan advises, by measured numbers, what it says of hosts and links, and how it is saved and read again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_pipesync.cli import main
from lightning_pipesync.lab.bench import preflight
from lightning_pipesync.lab.bench.preflight import HostFacts, exchange_facts, facts_of_this_host, findings
from lightning_pipesync.lab.plan import costs as plan_costs
from lightning_pipesync.lab.plan.costs import Links, outliers, partners, several_connections
from lightning_pipesync.lab.plan.picture import draw
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import Elsewhere, latency_of, of_result, read_plan
from lightning_pipesync.lab.plan.text import WIDTH
from lightning_pipesync.lab.plan.verdict import verdict_of
from lightning_pipesync.lab.plan.work import slow_ranks
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.lab.predictions.work import Work
from tests.quick.lab.test_plan import MIB, PROFILE, WORK, between, cluster

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
        ([(DDP, [0.2, 0.21]), (DEAR, [0.15, 0.16]), (LARGER, [0.14, 0.14])], "Use dear: 140 ms", LARGER, None),
        ([(DDP, [0.2] * 3), (DEAR, [0.19, 0.19, 0.21]), (LOCAL, [0.3] * 3)], "DDP is enough: 200 ms", DDP, None),
        ([(DDP, [0.2, 0.2]), (DEAR, [0.199, 0.199])], "DDP is enough: 200 ms", DDP, None),
        ([(DDP, [0.102, 0.102]), (DEAR, [0.11, 0.11])], "DDP is enough: 102 ms", DDP, None),
        (
            [(DDP, [0.2]), (DEAR, [0.3]), (LOCAL, [0.05]), (FRAGMENTS, "ValueError: fragments")],
            "Of exact methods DDP is enough: 200 ms",
            DDP,
            LOCAL,
        ),
        ([(DDP, [0.2]), (DEAR, [0.1]), (LOCAL, [0.11])], "Use dear: 100 ms a step, 2 times", DEAR, None),
        ([(DDP, "AttributeError: no"), (DEAR, [0.1]), (LOCAL, [0.01])], "No advice: DDP could not be run", None, None),
        ([(DDP, [0.2]), (DEFAULT, [0.15]), (DEAR, [0.17])], "DDP is enough: 150 ms", DEFAULT, None),
        ([(DDP, "RuntimeError: no"), (DEFAULT, [0.2]), (DEAR, [0.1])], "Use dear: 100 ms", DEAR, None),
        ([(DDP, [0.2])], "DDP is enough: 200 ms", DDP, None),
        ([], "Try dear: 100 ms a step, 2 times as fast as DDP (predicted", DEAR, FRAGMENTS),
    ],
)
def test_nothing_is_advised_that_is_not_ahead_of_measured_ddp(
    measured: list[tuple[Prediction, Any]], advice: str, exact: Prediction | None, other: Prediction | None
) -> None:
    """By 2 %, in every round. Predictions, all of which are faster than DDP's, count only where nothing was run."""
    verdict = verdict_of(ALL, outcomes(measured), computation=0.1)
    assert " ".join(verdict.sentences).startswith(advice)
    assert (verdict.exact, verdict.other) == (exact, other)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([0.176, 0.176, 0.21], "takes 176 ms, 12% less, but not in every round."),
        ([0.199, 0.199, 0.199], "takes 199 ms, not 2% less."),
        ([0.21, 0.21, 0.21], "takes 210 ms."),
    ],
)
def test_why_the_best_beside_ddp_is_not_advised(seconds: list[float], said: str) -> None:
    verdict = verdict_of(ALL, outcomes([(DDP, [0.2] * 3), (DEAR, seconds)]), computation=0.1)
    assert verdict.sentences[1].endswith(said)


@pytest.mark.parametrize(("error", "exact"), [(0.05, DEAR.method), (0.11, "ddp")])
def test_a_prediction_counts_if_its_error_is_smaller_than_its_gain(error: float, exact: str) -> None:
    verdict = verdict_of([DDP, replace(DEAR, error=error)], {}, computation=0.1)
    assert verdict.exact is not None
    assert verdict.exact.method == exact
    assert verdict.sentences[0].startswith("Nothing is surely ahead of DDP") == (exact == "ddp")
    assert verdict.sentences[-1].endswith("50% less, but costs may be off by more.") == (exact == "ddp")


# --- the report -------------------------------------------------------------------------------------------------------


def result_of(at: Cluster, measured: dict[str, dict[str, Any]], work: Work = WORK) -> dict[str, Any]:
    """What a plan saves."""
    saved = {"made": "2026-01-01 12:00", "settings": {"model": "train:for_plan"}, "world_size": at.world_size}
    saved |= {"cluster": asdict(at), "work": asdict(work), "links": None, "measured": measured}
    return {**saved, "findings": [], "codecs": {}}


def report(measured: dict[str, dict[str, Any]], at: Cluster, work: Work = WORK) -> str:
    text = as_markdown(work, at, result_of(at, measured))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    return text


def test_the_verdict_comes_first_and_measured_rows_by_what_was_measured() -> None:
    at = cluster(1e8)
    found = sorted(predict(WORK, at), key=lambda one: one.seconds)
    steps = {"ddp": 0.3, "dear": 0.25, "selsync": 0.2, "pipe_sgd": 0.4}
    first = {one.method: one for one in reversed(found)}
    text = report(outcomes([(first[method], [seconds]) for method, seconds in steps.items()]), at)
    assert text.splitlines()[0] == "Use dear: 250 ms a step, 1.2 times as fast as DDP (measured)."
    assert text.splitlines()[1] == "Not exact, and faster: selsync, 200 ms a step, 1.5 times as fast as DDP."
    run, rest = text.split("predicted, not run")
    rows = [line.split()[:3] for line in run.splitlines() if line.startswith(6 * " ") and line[6] != " "]
    assert [" ".join(row) for row in rows] == ["dear 250 1.20", "ddp 300 1.00", "selsync 200 1.50", "pipe_sgd 400 0.75"]
    assert "local_sgd" in rest, "which is predicted to be faster than all that were run"
    assert "LocalSGD" not in rest
    assert "Trainer(strategy=DeARStrategy(" in text
    assert "Trainer(strategy=SelSyncStrategy(" in text


def test_what_failed_or_was_refused_is_said_in_full_and_nothing_is_advised() -> None:
    at, reason = cluster(1e8), "a reason that is longer than a line of a terminal has columns, " * 3
    found = predict(WORK, at)
    dear = next(one for one in found if one.method == "dear")
    names = [f"local_sgd:period={period},fragments=4" for period in (4, 8)]
    reasons = {**dict.fromkeys(names, "fragments=4 is more than the 2 layers."), "ea_pipe": "there are no layers."}
    refused = replace(WORK, refused=reasons)
    of_ddp = [(one, f"AttributeError: {reason}") for one in found if one.method == "ddp"]
    text = report(outcomes([*of_ddp, (dear, [0.1])]), at, refused)
    said = " ".join(text.split())
    assert said.startswith("No advice: DDP could not be run")
    assert said.count(reason.strip()) == 2, "in the verdict, and once for both rows of DDP"
    assert said.count("local_sgd with fragments=4 cannot be used: fragments=4 is more than the 2 layers.") == 1
    assert " ea_pipe cannot be used: there are no layers." in said
    assert "Trainer(" not in text


def test_a_plan_for_shards_says_hsdp_and_what_to_type(tmp_path: Path) -> None:
    work, at, result = of_result(json.loads(json.dumps(result_of(between(1e7), {}))))
    text = as_markdown(work, at, result)
    said = " ".join(text.split())
    assert said.startswith("Try dear:")
    assert "on 4 hosts of 8 ranks, which share a replica, with 640 Mbit/s each" in said
    assert "times HSDP" in said
    assert "DDP" not in text
    for line in ('fully_shard(model, mesh=mesh["shards"])', 'replicas=mesh["replicas"]', "ranks_per_replica=8"):
        assert line in text
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": "plan", "results": [result]}))
    assert read_plan(path, Elsewhere(rate="6.4gbit"))[1].host_bandwidth == pytest.approx(8e8)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (8, "is a ring, as torch's Gloo always has it"),
        (4096, "is a double binary tree, which is the faster"),
    ],
)
def test_what_was_not_measured_is_said_to_be_extrapolated(hosts: int, words: str) -> None:
    """And what all-reduce is assumed of DDP."""
    measured = cluster(1e8)
    assert "xtrapolated" not in report({}, measured)
    at = replace(measured, backend=replace(measured.backend, world_size=4)).with_hosts(hosts).with_bandwidth(2e8)
    said = " ".join(as_markdown(WORK, at, result_of(measured, {})).split())
    assert f"DDP's all-reduce {words}" in said
    assert "Extrapolated from 4 hosts with 800 Mbit/s each. Assumed: " in said
    assert "(extrapolated; nothing was run)" in said
    assert "predicted, not run" not in said


def test_the_picture(tmp_path: Path) -> None:
    at = cluster(1e8, alpha_error=1e-5, beta_error=1e-10)
    measured = outcomes([(one, [one.seconds]) for one in predict(WORK, at) if one.method in ("ddp", "dear")])
    draw(WORK, at, result_of(at, measured), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


# --- hosts and links --------------------------------------------------------------------------------------------------


def works(*seconds: float) -> list[Work]:
    return [Work(replace(PROFILE, forward=of_rank, backward=0.0, update=0.0)) for of_rank in seconds]


@pytest.mark.parametrize(
    ("own", "usual", "step", "named"),
    [(0.005, 0.004, 0.005, 0), (0.2, 0.1, 0.25, 1), (0.024, 0.02, 0.4, 0), (0.12, 0.1, 1.0, 0), (0.02, 0.01, 0.02, 1)],
)
def test_a_rank_is_slow_if_it_matters(own: float, usual: float, step: float, named: int) -> None:
    """Some milliseconds are noise, and a small part of a step is not worth a word."""
    assert len(slow_ranks(works(usual, usual, own), [facts(rank) for rank in range(3)], step)) == named


def test_a_slow_rank_is_named_and_hosts_that_are_emulated_share_their_cores() -> None:
    everyones, takes = works(0.1, 0.1, 0.2), "its computation takes 200 ms, and that of most 100 ms"
    (named,) = slow_ranks(everyones, [facts(rank) for rank in range(3)], 0.25)
    assert named.startswith(f"rank 2 (node2, 10.0.0.2): {takes}")
    assert "Look for other processes there" in named
    (named,) = slow_ranks(everyones, [facts(rank, host="laptop", cores=2) for rank in range(3)], 0.25)
    assert named.startswith(f"rank 2 (laptop, 10.0.0.2): {takes}")
    assert "These hosts are emulated, and share the 2 cores of laptop" in named
    assert "Look for" not in named


@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_each_pair_of_hosts_meets_once(world_size: int) -> None:
    rounds = [partners(rank, world_size) for rank in range(world_size)]
    for rank, of_rank in enumerate(rounds):
        assert sorted(one for one in of_rank if one is not None) == [r for r in range(world_size) if r != rank]
        assert all(partner is None or rounds[partner][n] == rank for n, partner in enumerate(of_rank))


def found_of(speed: Any, number: int = 4) -> list[str]:
    """What is said of hosts with links of ``speed(host, other host)``."""
    bandwidth = [[0.0 if a == b else speed(a, b) for b in range(number)] for a in range(number)]
    return outliers(Links(bandwidth, bandwidth), [f"host {rank}" for rank in range(number)])


@pytest.mark.parametrize(
    ("is_slow", "words"),
    [
        (lambda a, b: 3 in (a, b), ["host 3: 240 Mbit/s to and from the others, which have 960 Mbit/s."]),
        (lambda a, b: b == 1, ["host 1: 240 Mbit/s"]),  # in one direction
        (
            lambda a, b: a // 2 != b // 2,
            ["2 racks (0, 1; 2, 3): 240 Mbit/s between them, 960 Mbit/s", "ranks_per_replica=2", "torus_columns=2"],
        ),
        (lambda a, b: a % 2 != b % 2, ["2 racks (0, 2; 1, 3): 240 Mbit/s between", "numbered rack by rack"]),
        (lambda a, b: {a, b} == {1, 2}, ["host 1 and host 2: 240 Mbit/s, where others have 960 Mbit/s."]),
    ],
    ids=["host", "direction", "racks", "racks in turns", "pair"],
)
def test_what_is_slow_is_named(is_slow: Any, words: list[str]) -> None:
    (found,) = found_of(lambda a, b: 3e7 if is_slow(a, b) else 1.2e8)
    assert all(word in found for word in words)


def test_no_strategy_is_recommended_that_cannot_run_and_equal_links_are_no_finding() -> None:
    (found,) = found_of(lambda a, b: 3e7 if (a < 2) != (b < 2) else 1.2e8, 5)
    assert "2 racks (0, 1; 2, 3, 4)" in found
    assert "Strategy" not in found, "which is for racks of equal size"
    assert found_of(lambda a, b: 1.2e8 * (1 + 0.05 * a)) == found_of(lambda a, b: 1.2e8, 2) == []


def facts(rank: int, **changed: Any) -> HostFacts:
    usual: dict[str, Any] = {"rank": rank, "host": f"node{rank}", "address": f"10.0.0.{rank}", "interface": "eth0"}
    usual |= {"mtu": 1500, "backend_interface": "eth0", "nccl_interfaces": "", "cores": 8, "threads": 8}
    return HostFacts(**{**usual, "versions": {"torch": "2.13.0"}, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"backend_interface": "docker0"}, "Gloo uses the interface docker0, but eth0 leads to the other hosts"),
        ({"nccl_interfaces": "docker,lo"}, "NCCL_SOCKET_IFNAME=docker,lo excludes eth0, which leads to the other"),
        ({"nccl_interfaces": "^eth"}, "NCCL_SOCKET_IFNAME=^eth excludes eth0"),
        ({"nccl_interfaces": "=eth"}, "NCCL_SOCKET_IFNAME==eth excludes eth0"),
        ({"mtu": 9000}, "an MTU of 9000, but most hosts have 1500"),
        ({"versions": {"torch": "2.9.0"}}, "torch 2.9.0, but most hosts have 2.13.0"),
        ({"threads": 16}, "1 ranks with 16 threads in all on 8 cores. Set OMP_NUM_THREADS=8"),
    ],
)
def test_what_is_wrong_with_a_host_is_named(changed: dict[str, Any], words: str) -> None:
    ranks = [facts(0, nccl_interfaces="docker,eth"), facts(1, nccl_interfaces="^=docker0"), facts(2, **changed)]
    assert findings(ranks[:2]) == []
    (found,) = findings(ranks)
    assert words in found
    assert "node2" in found


def test_what_ranks_share_is_named() -> None:
    (found,) = findings([facts(0), facts(1), facts(2, address="10.0.0.1")])
    assert found.startswith("2 ranks have the address 10.0.0.1, whose link they share")
    (found,) = findings([facts(rank, host="node", threads=1, cores=2) for rank in range(4)])
    assert found == "Host node: 4 ranks on 2 cores, which they share."


def test_an_interface_that_reaches_nobody_is_refused_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("pipesync/facts/1", json.dumps(asdict(facts(1, backend_interface="lo"))))
    monkeypatch.setattr(preflight, "facts_of_this_host", facts)
    with pytest.raises(ValueError, match=r"rank 1 \(node1, 10.0.0.1\): Gloo uses .* lo, .* Set GLOO_SOCKET_IFNAME=e"):
        exchange_facts(store, 0, 2)
    store.set("pipesync/facts/1", json.dumps(asdict(facts(1, backend_interface="lo", interface="unknown"))))
    with pytest.raises(ValueError, match=r"with the address 10.0.0.1 leads .* GLOO_SOCKET_IFNAME to its name there"):
        exchange_facts(store, 0, 2)
    store.set("pipesync/facts/1", json.dumps(asdict(facts(1))))
    assert exchange_facts(store, 0, 2) == [facts(0), facts(1)]


@pytest.mark.parametrize(
    ("named", "interface"),
    [("127.0.1.1", "lo"), (OSError("unknown host"), "lo"), ("10.9.8.7", "of 10.9.8.7"), ("10.0.0.1", "eth0")],
)
def test_the_interface_of_gloo_is_that_of_the_host_s_name(named: Any, interface: str) -> None:
    """Debian and Ubuntu name the host in /etc/hosts, with an address that other hosts do not reach."""
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    with (
        patch.dict("os.environ", clear=True),
        patch("socket.gethostbyname", side_effect=[named]),
        patch.object(preflight, "_addresses", return_value=addresses.items()),
        patch.object(preflight, "address_of_this_host", return_value="10.0.0.1"),
    ):
        assert facts_of_this_host(0).backend_interface == interface


def test_an_interface_that_is_not_known_is_not_advised() -> None:
    assert findings([facts(0), facts(1, interface="unknown", nccl_interfaces="eth1")]) == []


@pytest.mark.parametrize(("several", "found"), [(1.2e9, 0), (2e9, 1)])
def test_several_connections_are_recommended_where_they_carry_more(several: float, found: int) -> None:
    with patch.object(plan_costs, "measure_bandwidth", lambda connections, stride: several):
        told = several_connections(1e9)
    assert len(told) == found
    assert all(one.startswith("One TCP connection carries 8 Gbit/s, 4 carry 16 Gbit/s") for one in told)


# --- what is saved ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A plan of 4 hosts, in which DDP was run."""
    result = {**result_of(cluster(1e8), {"ddp": {"seconds": [0.1]}})}
    result["links"] = {"bandwidth": [], "latency": [[0, 1e-4, 2e-4], [1e-4, 0, 1e-4], [2e-4, 3e-4, 0]]}
    result["predictions"] = [asdict(one) for one in predict(WORK, cluster(1e8))]
    assert latency_of(result) == pytest.approx(1.5e-4)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"kind": "plan", "results": [result]}))
    return path


def test_a_plan_for_another_latency_says_so(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(saved), "--latency", "40ms"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on 4 hosts with 800 Mbit/s each and 40 ms one way" in said
    assert "a message takes 40 ms one way, where 0.15 ms were measured" in said


def test_a_plan_for_other_hosts_is_saved_with_its_own_predictions(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed, or compared with a training, is of those hosts; others still follow from what was measured."""
    before, folder = saved.read_text(), tmp_path / "far"
    words = ["plan", "--from", str(saved), "--hosts", "64", "--rate", "25gbit"]
    assert main([*words, "--output", str(folder)]) == 0
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.partition("plan.png.\n")[2])
    assert printed == json.loads((folder / "plan.json").read_text())
    there = cluster(1e8).with_hosts(64).with_bandwidth(25e9 / 8)
    assert printed["results"][0]["predictions"] == json.loads(json.dumps([asdict(one) for one in predict(WORK, there)]))
    assert printed["results"][0]["measured"] == {}
    assert as_markdown(*read_plan(folder / "plan.json")) == (folder / "plan.md").read_text()
    elsewhere = Elsewhere(hosts=8)
    for one, other in zip(read_plan(folder / "plan.json", elsewhere), read_plan(saved, elsewhere), strict=True):
        assert one == other
    assert main([*words, "--output", str(tmp_path)]) == 2
    assert "has the plan.json that is read, and what was measured" in capsys.readouterr().err
    assert saved.read_text() == before


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--model=tests.quick.lab.test_plan:small_model", "with --from nothing is measured"),
        ("--rounds=5", "with --from nothing is measured"),
        ("--ranks_per_replica=2", "with --from nothing is measured"),
        ("--delay=40ms", "with --from nothing is measured in an emulated network"),
        ("--racks=2", "with --from nothing is measured in an emulated network"),
        ("--latency=40", "'40' is not a delay"),
    ],
)
def test_what_says_how_to_measure_is_refused_where_nothing_is_measured(
    saved: Path, option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", str(saved), option]) == 2
    error = capsys.readouterr().err
    assert option[2:].partition("=")[0] in error
    assert said in error


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--latency=40ms", "latency='40ms' is for other links than were measured, with --from"),
        ("--ranks_per_replica=2", "ranks_per_replica=2 needs a launcher"),
        ("--ranks_per_replica=0", "ranks_per_replica must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", option]) == 2
    assert said in capsys.readouterr().err
