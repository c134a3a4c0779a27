"""How fast replicas that average with neighbors come together, as the benchmark measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gossip import rounds_until
from lightning_pipesync.core.cost import LinkCost
from tests.bench_runs import assert_pictures, result_of, run_command


def test_what_is_measured_is_the_theory(tmp_path: Path) -> None:
    result = result_of("gossip", "--replicas 5 8 --rounds 60 --repetitions 12", tmp_path)
    assert [(curve["neighbors"], curve["replicas"]) for curve in result["curves"]] == [
        (kind, number) for kind in ("ring", "random_pairs") for number in (5, 8)
    ]
    for curve in result["curves"]:
        theory = curve["theory"]
        if curve["neighbors"] == "ring":
            assert curve["measured"] == pytest.approx(theory, rel=1e-3)
            assert all(value <= theory**n + 1e-9 for n, value in enumerate(curve["spread"])), "never slower"
        else:
            assert abs(curve["measured"] - theory) < 2 * curve["interval"]
    text = (tmp_path / "gossip.md").read_text()
    assert "| ring | 8 | 0.805 | 0.805 | 0.195 | 22 | 2 (1.75) |" in text
    assert_pictures(tmp_path, "gossip")


def test_rounds_by_hand() -> None:
    assert rounds_until(0.01, 0.1) == 2
    assert rounds_until(0.01, 0.5) == 7  # 1/128


def test_the_cost_of_a_round() -> None:
    """All neighbors at once: one latency, and every byte to each."""
    link = LinkCost(alpha=2.0, beta=0.5)
    assert [link.average_with(10, peers) for peers in (0, 1, 2)] == [0, 7, 12]


@pytest.mark.parametrize(
    ("options", "word"), [("--replicas 3", "replicas"), ("--rounds 0", "rounds"), ("--repetitions 1", "repetitions")]
)
def test_refused(options: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("gossip", options) != 0
    assert word in capsys.readouterr().err
