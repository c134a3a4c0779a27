"""The norm of many tensors."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_pipesync.core.norm import SquaredNorm


def test_squared_norm() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.bfloat16)]
    expected = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert SquaredNorm(gradients).item() == pytest.approx(expected, rel=1e-6)
    assert SquaredNorm(gradients[:1]).item() == pytest.approx(gradients[0].double().square().sum().item(), rel=1e-6)
    assert SquaredNorm([]).item() == 0.0
    assert SquaredNorm([torch.tensor([1.5e19])] * 2).item() == pytest.approx(4.5e38, rel=1e-6), "beyond fp32"
    assert math.isinf(SquaredNorm([torch.tensor([math.inf])]).item())
    assert math.isnan(SquaredNorm([torch.tensor([math.nan])]).item())
