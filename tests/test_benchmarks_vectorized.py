"""The pipelines that train many models at once: each of them is the reference."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

import benchmarks.tasks.mnist1d  # noqa: F401 - adds itself to the tasks
from benchmarks.pipelines.layered import residual_mlp
from benchmarks.pipelines.vectorized import Dense, trainings_of
from lightning_pipesync.lab.bench.tasks import build_task
from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from tests.reference_ea_pipe import Weights, reference_of

WIDTHS, STAGE_OF, STEPS, SAMPLES = (6, 9, 8, 7, 8, 3), [0, 0, 1, 2, 2], 24, 4
#: Settings, momentum and weight decay.
CASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "ea_pipe": ({"elastic_force": 0.3}, 0.0, 1e-3),
    "ea_pipe, momentum": ({"elastic_force": 0.6, "period": 3}, 0.9, 0.0),
    "ea_pipe, more replicas": ({"replicas": 6, "period": 2}, 0.0, 0.0),
    "pipedream": ({"algorithm": "pipedream"}, 0.9, 1e-3),
    "weight_stashing": ({"algorithm": "weight_stashing"}, 0.9, 0.0),
    "naive": ({"algorithm": "naive"}, 0.9, 0.0),
    "spectrain": ({"algorithm": "spectrain"}, 0.9, 1e-3),
    "spectrain, smoothed": ({"algorithm": "spectrain"}, 0.0, 0.0),
}
RATES = (0.05, 0.2)


def weights_of(seed: int) -> Weights:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(i, o).double() for i, o in pairwise(WIDTHS)]
    return [p.detach() for layer in layers for p in layer.parameters()]


def batches_of(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(SAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64)
        return x, torch.randint(WIDTHS[-1], (SAMPLES,), generator=generator)

    return [draw() for _ in range(STEPS)]


def expected(settings: dict[str, Any], momentum: float, decay: float, seed: int, rate: float) -> Weights:
    make = partial(SGD, lr=rate, momentum=momentum, weight_decay=decay)
    return reference_of(settings, weights_of(seed), make, batches_of(seed), STAGE_OF, 0.0 if momentum else 0.9)


@pytest.mark.parametrize("case", CASES)
def test_each_training_is_the_reference(case: str) -> None:
    """Trainings that differ in seed and learning rate, in one program, in double precision."""
    settings, momentum, decay = CASES[case]
    members = [(seed, rate) for seed in (0, 1) for rate in RATES]
    initial = torch.stack([parameters_to_vector(weights_of(seed)) for seed, _ in members])
    rates = torch.tensor([[rate] for _, rate in members], dtype=torch.float64)
    configs = [EAPipeConfig(**settings)] * len(members)
    trainings = trainings_of(configs, Dense(WIDTHS, STAGE_OF), initial, rates, momentum, decay)
    batches = [batches_of(seed) for seed, _ in members]
    for t in range(0, STEPS, trainings.num_at_once):
        now = range(t, t + trainings.num_at_once)
        x, y = (torch.stack([torch.stack([own[k][part] for own in batches]) for k in now]) for part in (0, 1))
        trainings.step(x, y)
    for (seed, rate), row, start in zip(members, trainings.master, initial, strict=True):
        reference = parameters_to_vector(expected(settings, momentum, decay, seed, rate))
        assert (reference - start).norm() > 0.01
        torch.testing.assert_close(row, reference, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_residual_layers() -> None:
    model = residual_mlp(inputs=6, width=5, num_blocks=7).double()
    dense = Dense([6, *[5] * 8, 10], [0] * 9, range(1, 8))
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.tensor([1, 0, 9, 3])
    torch.nn.functional.cross_entropy(model(x), y).backward()
    rows = parameters_to_vector(model.parameters()).detach().unsqueeze(0)
    out = torch.empty_like(rows)
    dense.gradient(rows, rows, x.unsqueeze(0), y.unsqueeze(0), out)
    gradient = parameters_to_vector([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(out[0], gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense.forward(rows, x.unsqueeze(0))[-1][0], model(x))


def test_mnist1d_is_as_hard_as_published() -> None:
    """A linear model finds 32 % of the digits in the authors' own signals (their Table 1)."""
    task = build_task("mnist1d")
    (x, y), (test_x, test_y) = (
        torch.utils.data.default_collate(list(part)) for part in (task.train_set, task.test_set)
    )
    assert (x.shape, test_x.shape) == ((4000, 40), (1000, 40))
    assert torch.equal(torch.cat([y, test_y]).bincount(), torch.full((10,), 500))
    torch.manual_seed(0)
    linear = torch.nn.Linear(40, 10)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(linear(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert (linear(test_x).argmax(dim=1) == test_y).float().mean().item() == pytest.approx(0.32, abs=0.02)
