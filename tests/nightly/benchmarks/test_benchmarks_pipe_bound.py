"""Trainings with delayed gradients beside the bounds of Pipe-SGD: the recursion and the formulas, written out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pipe_bound import NUM_POINTS, PipeBound, step_size_of, train
from benchmarks.results.exhibit import Claims, Finding
from benchmarks.results.job import Record
from benchmarks.results.papers import TABLES
from benchmarks.theory.convex import PROBLEMS
from benchmarks.theory.pipe_cost import convergence_bound, first_step_size, strongly_convex_bound
from benchmarks.theory.points import points_of
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of, run_command


@pytest.mark.parametrize("name", ["absolute", "mean"])
def test_a_training_is_the_delayed_recursion(name: str) -> None:
    """w[t] = w[t - 1] - gamma g[t - (k + 1)] (Algorithm 1, line 5), within the interval from -1 to 1."""
    problem, steps, k = PROBLEMS[name](), 30, 2
    [measured] = train(problem, (k,), 1, [steps])
    generator = torch.Generator().manual_seed(0)
    weights = [math.copysign(1.0, torch.randn(1, 1, generator=generator, dtype=torch.float64).item())]
    gradients, values = list[float](), list[float]()
    for t in range(steps):
        target = problem.targets[torch.randint(len(problem.targets), (1,), generator=generator)].item()
        w = weights[-1]
        if name == "absolute":
            values.append(abs(w - 1 / math.pi))
            gradients.append(math.copysign(1.0, w - target))
        else:
            values.append(((w + 1 / 3) ** 2 + (w - 1) ** 2) / 4 - 2 / 9)
            gradients.append(w - target)
        if t >= k:
            rate = step_size_of(problem, k)(t - k + 1)
            w = max(-1.0, min(1.0, w - rate * gradients[t - k]))
        weights.append(w)
    assert measured.item() == pytest.approx(sum(values) / steps, rel=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_constants_of_a_problem(name: str) -> None:
    problem, generator = PROBLEMS[name](), torch.Generator().manual_seed(1)
    points = torch.randn(50, problem.inputs.shape[1], generator=generator, dtype=torch.float64)
    points = problem.project(points * torch.linspace(0, 3, 50, dtype=torch.float64).unsqueeze(1) * problem.radius)
    norms = points.norm(dim=1)
    assert norms.max() == pytest.approx(problem.radius)
    assert norms.min() == 0
    points.requires_grad_()
    samples = torch.randint(len(problem.inputs), (50,), generator=generator)
    own = problem.gradient(points, samples)
    assert own.norm(dim=1).max() <= problem.lipschitz + 1e-12
    outputs = (points * problem.inputs[samples]).sum(dim=1)
    losses = problem.loss(outputs, problem.targets[samples]) + problem.l2 / 2 * points.square().sum(dim=1)
    [gradient] = torch.autograd.grad(losses.sum(), points)
    torch.testing.assert_close(own, gradient)
    # No point is below the optimum, nor below the parabola of the strong convexity around any other.
    values = problem.value(points).detach()
    assert values.min() >= problem.optimum() - 1e-7
    every = torch.arange(len(problem.inputs))
    whole = problem.gradient(points.detach().unsqueeze(1), every).mean(dim=1)
    apart = points.detach().unsqueeze(1) - points.detach()
    above = values.unsqueeze(1) - values - (apart * whole).sum(dim=-1)
    assert (above >= problem.strong_convexity / 2 * apart.square().sum(dim=-1) - 1e-9).all()


def test_known_optima() -> None:
    assert PROBLEMS["absolute"]().optimum() == 0
    assert PROBLEMS["mean"]().optimum() == pytest.approx(2 / 9, abs=1e-7)


def test_bounds_by_hand() -> None:
    assert convergence_bound(800, 1, radius=2, lipschitz=3) == pytest.approx(8 * 2 * 3 * math.sqrt(2 / 800))
    assert first_step_size(1, radius=2, lipschitz=3) == pytest.approx(1 / 3)
    by_hand = (2 * 0.5 * 4 + 2.5 * 9 / 0.5 * (1 + math.log(100))) / 100
    assert strongly_convex_bound(100, 2, 0.5, radius=2, lipschitz=3) == pytest.approx(by_hand)


def test_command(tmp_path: Path) -> None:
    result = result_of("pipe_bound", "--problems absolute mean --staleness 0 3 --steps 100 --trainings 4", tmp_path)
    for problem in result["problems"]:
        assert problem["steps"] == points_of(100, NUM_POINTS)
        for curve in problem["curves"]:
            assert len(curve["measured"]) == len(curve["bound"]) == len(problem["steps"])
            assert all(value < bound for value, bound in zip(curve["measured"], curve["bound"], strict=True))
        early, late = problem["curves"]
        assert late["measured"][-1] > early["measured"][-1]
    text = (tmp_path / "pipe_bound.md").read_text()
    assert text.count("below the bound for every k and T") == 2
    assert_pictures(tmp_path, "pipe_bound")


def found(results: list[dict[str, Any]]) -> Finding:
    """What the table of claims has of it."""
    claims = TABLES["pipe_sgd_claims"]
    assert isinstance(claims, Claims)
    [claim] = [claim for claim in claims.claims if claim.where == "convergence"]
    return claim.find([Record("job", "command", "kind", {}, results)])


def test_a_curve_above_its_bound_is_said(tmp_path: Path) -> None:
    result_of("pipe_bound", "--problems mean --staleness 0 1 --steps 50 --trainings 2", tmp_path)
    results = json.loads((tmp_path / "pipe_bound.json").read_text())["results"]
    assert found(results).holds == "yes"
    results[0]["problems"][0]["curves"][1]["bound"][3] = 1e-9
    assert "is above the bound with k = 1." in PipeBound().report(results)
    assert found(results).holds == "no"


@pytest.mark.parametrize(("option", "word"), [("--problems cubic", "cubic"), ("--staleness -1", "staleness")])
def test_refused(option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("pipe_bound", option) != 0
    assert word in capsys.readouterr().err
