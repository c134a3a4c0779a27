"""Elastic averages on a quadratic beside Theorem 1 of EA-Pipe: they are Eq. 13, and the report says what is above."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ea_pipe_bound import (
    GAP,
    LIPSCHITZ,
    NUM_POINTS,
    SIZE,
    VARIANCE,
    EAPipeBound,
    Quadratic,
    Setting,
    measure,
)
from benchmarks.results.exhibit import Claims, Finding
from benchmarks.results.job import Record
from benchmarks.results.papers import TABLES
from benchmarks.theory.elastic_averaging import mixing_matrix
from benchmarks.theory.points import points_of
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of, run_command


@pytest.mark.parametrize("period", [1, 3])
def test_a_training_is_the_matrix_form(period: int) -> None:
    """X_{k+1} = (X_k - eta G_k) S_k (Eqs. 11 to 14), where S_k is the mixing matrix at the end of a period."""
    n, rounds, trainings = 3, 10, 2
    settings = [Setting(n, 0.3, period, 0.0, True), Setting(n, 0.6, period, 2.0, False)]
    curves = measure(settings, trainings, [4, rounds])
    generator = torch.Generator().manual_seed(0)
    shape = n, trainings, SIZE
    noises = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(rounds)]
    eigenvalues = Quadratic(torch.zeros(1, 1)).eigenvalues
    for setting, curve in zip(settings, curves, strict=True):
        mixing = mixing_matrix(n, setting.force)
        total = torch.zeros(trainings, dtype=torch.float64)
        x = torch.stack([Quadratic(torch.zeros(1, 1)).initial()] * (n + 1), dim=1).repeat(trainings, 1, 1)
        for k in range(rounds):
            total += (x.mean(dim=2) * eigenvalues).square().sum(dim=1)
            exact = x[:, :, :n] * eigenvalues[:, None]
            variance = setting.growth * exact.square().sum(dim=1, keepdim=True) + VARIANCE
            noisy = exact + (variance / SIZE).sqrt() * noises[k].permute(1, 2, 0)
            x[:, :, :n] -= setting.rate * noisy
            if (k + 1) % period == 0:
                x = x @ mixing
            if k == 3:
                assert curve["measured"][0] == pytest.approx(total.mean().item() / 4)
        assert curve["measured"][1] == pytest.approx(total.mean().item() / rounds)


def test_constants_of_the_quadratic() -> None:
    growths = torch.tensor([[0.0], [2.0]], dtype=torch.float64).repeat_interleave(20_000, dim=0)
    model = Quadratic(growths)
    initial = model.initial()
    assert (model.eigenvalues * initial.square()).sum() / 2 == pytest.approx(GAP)
    assert model.eigenvalues.max() == pytest.approx(LIPSCHITZ)
    noise = torch.randn(40_000, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out, seen = torch.empty_like(noise), initial.expand_as(noise)
    model.gradient(seen, seen, noise, noise, out)
    exact = initial * model.eigenvalues
    variances = (out - exact).square().sum(dim=1).unflatten(0, (2, -1)).mean(dim=1)
    expected = [VARIANCE + growth * exact.square().sum().item() for growth in (0.0, 2.0)]
    assert variances.tolist() == pytest.approx(expected, rel=0.02)


def test_command(tmp_path: Path) -> None:
    result = result_of("ea_pipe_bound", "--stages 2 4 --rounds 60 --trainings 3", tmp_path)
    assert result["rounds"] == points_of(60, NUM_POINTS)
    assert len(result["curves"]) == 2 * 2 * 2 * 2 * 2
    for curve in result["curves"]:
        assert len(curve["measured"]) == len(curve["bound"]) == len(result["rounds"])
        assert all(value < bound for value, bound in zip(curve["measured"], curve["bound"], strict=True))
    assert (tmp_path / "ea_pipe_bound.md").read_text().count("below the bound for every setting and K") == 4
    assert_pictures(tmp_path, "ea_pipe_bound")


def found(results: list[dict[str, Any]]) -> Finding:
    """What the table of claims has of it."""
    claims = TABLES["ea_pipe_claims"]
    assert isinstance(claims, Claims)
    [claim] = [claim for claim in claims.claims if claim.where == "Theorem 1"]
    return claim.find([Record("job", "command", "kind", {}, results)])


def test_a_curve_above_its_bound_is_said(tmp_path: Path) -> None:
    result_of("ea_pipe_bound", "--stages 2 --growths 0 --rounds 20 --trainings 1", tmp_path)
    results = json.loads((tmp_path / "ea_pipe_bound.json").read_text())["results"]
    assert found(results).holds == "yes"
    curve = results[0]["curves"][0]
    curve["bound"][2] = curve["measured"][2] / 2
    assert "is above the bound in 1 of 4 settings, by a factor of up to 2.00." in EAPipeBound().report(results)
    assert found(results).holds == "in part"


@pytest.mark.parametrize("option", ["--forces 1.5", "--growths -1", "--stages 0", "--rounds 0"])
def test_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("ea_pipe_bound", option) != 0
    assert option.split()[0][2:] in capsys.readouterr().err
