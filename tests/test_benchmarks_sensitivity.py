"""What is measured of gradients during a training: the curvature, densities, and that measuring changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.gradients.curvature import flat, top_eigenvalue
from benchmarks.gradients.densities import density_of
from benchmarks.gradients.training import train
from benchmarks.sensitivity import Sensitivity, changes, correlation, relative_changes
from lightning_pipesync.lab.bench.models.real import TransformerLM
from tests.bench_runs import assert_pictures, result_of, run_command


def start_of(size: int) -> np.ndarray:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy()


def test_the_largest_eigenvalue_is_not_that_of_the_largest_magnitude() -> None:
    w = torch.ones(12, requires_grad=True)
    eigenvalues = torch.tensor([-5.0, 3.0, 1.0, *[0.5] * 9])
    value, vector = top_eigenvalue(lambda: (eigenvalues * w.square()).sum() / 2, [w], start_of(12))
    assert value == pytest.approx(3.0, rel=0.05)
    assert abs(vector[1]) > 0.95


def test_eigenvalue_of_a_network() -> None:
    """Beside the whole Hessian, with a parameter that the loss does not depend on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    unused = torch.zeros(2, requires_grad=True)
    x, y = torch.randn(20, 5), torch.randint(3, (20,))
    parameters = [*net.parameters(), unused]
    names = [name for name, _ in net.named_parameters()]

    def loss_of(weights: Tensor) -> Tensor:
        parts = weights.split([p.numel() for p in net.parameters()])
        shaped = {n: part.view_as(p) for n, part, p in zip(names, parts, net.parameters(), strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(net, shaped, (x,)), y)

    hessian = torch.func.hessian(loss_of)(flat(list(net.parameters())).detach())

    def loss() -> Tensor:
        return nn.functional.cross_entropy(net(x), y) + 0 * unused.sum()

    value, _ = top_eigenvalue(loss, parameters, start_of(sum(p.numel() for p in parameters)))
    assert value == pytest.approx(torch.linalg.eigvalsh(hessian).max().item(), rel=0.05)


def test_eigenvalue_of_attention() -> None:
    """The eigenvector is one: along it the gradient changes by the eigenvalue."""
    torch.manual_seed(0)
    model = TransformerLM(hidden=8, depth=1, heads=2, vocabulary=11, length=6).eval()
    tokens = torch.randint(11, (4, 6))
    parameters = list(model.parameters())

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    value, vector = top_eigenvalue(loss, parameters, start_of(sum(p.numel() for p in parameters)))
    direction, gradients = torch.from_numpy(vector), []
    for step in (-1e-2, 2e-2):
        with torch.no_grad():
            for part, p in zip(direction.split([p.numel() for p in parameters]), parameters, strict=True):
                p.add_(step * part.view_as(p))
        gradients.append(flat(torch.autograd.grad(loss(), parameters)))
    along = (gradients[1] - gradients[0]) @ direction / 2e-2
    assert value > 0
    assert along.item() == pytest.approx(value, rel=0.05)


def test_density() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    grid, [wide, narrow, constant] = density_of([values, 0.1 * values, torch.zeros(5)])
    width = grid[1] - grid[0]
    assert grid[-1] == pytest.approx(2.576, rel=0.05)  # 99 % of a normal distribution
    assert sum(wide) * width == pytest.approx(0.99, abs=0.02)
    assert max(narrow) == pytest.approx(10 * max(wide), rel=0.15)
    assert set(constant) == {0.0}


def test_correlation_and_changes() -> None:
    assert correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert correlation([1, 2, 3], [5, 5, 5]) == 0
    assert changes([1, 3, 2]) == [2, 1]
    assert relative_changes([1, 3, 1.5]) == pytest.approx([2, 0.5])


def test_measuring_changes_nothing() -> None:
    """The digits' network has dropout: more measurements use no more random numbers."""
    few, many = (train("digits", 0, Sensitivity(workers=8, epochs=2, evaluations=n, samples=8)) for n in (1, 3))
    assert len(many["points"]) == 3
    for key in ("quality", "squared_norm", "variance"):
        assert many["points"][-1][key] == few["points"][-1][key], key
    assert many["points"][-1]["eigenvalue"] == pytest.approx(few["points"][-1]["eigenvalue"], rel=0.05)
    assert few["densities"] == many["densities"]
    assert [density["epoch"] for density in few["densities"]] == [1, 2]


def test_command(tmp_path: Path) -> None:
    options = "--tasks signals mnist1d --seeds 0 --epochs 1 --evaluations 4 --samples 8 --workers 16"
    result = result_of("sensitivity", options, tmp_path)
    assert [(run["task"], run["seed"]) for run in result["runs"]] == [("signals", 0), ("mnist1d", 0)]
    text = (tmp_path / "sensitivity.md").read_text()
    for figure in ("Fig. 3", "Fig. 4", "Fig. 5"):
        assert figure in text
    assert_pictures(tmp_path, "sensitivity_density", "sensitivity_hessian", "sensitivity_change")


@pytest.mark.parametrize("option", ["--tasks cubic", "--samples 9", "--smoothing 0", "--workers 0", "--epochs 0"])
def test_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("sensitivity", option) != 0
    assert option.split()[0][2:].removesuffix("s") in capsys.readouterr().err
