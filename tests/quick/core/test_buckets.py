"""Which parameters travel together, in which memory, and the norm of many tensors."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipesync.core.buckets import (
    ALIGNMENT,
    MIB,
    Bucket,
    Fusion,
    buffer_reader,
    flattened,
    plan_buckets,
    shaped,
)
from lightning_pipesync.core.parameters import SquaredNorm, check_values, collect_parameters


def plan(module: nn.Module, fusion: Fusion, *optimizers: torch.optim.Optimizer) -> list[list[str]]:
    parameters = collect_parameters(module, optimizers)[::-1]
    return [[parameter.name for parameter in bucket] for bucket in plan_buckets(parameters, fusion)]


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_by_size_by_layers_or_one_for_each() -> None:
    """8 x 8 weights of 256 bytes and biases of 32: two layers fill 576 bytes."""
    by_two_layers = [["2.bias", "2.weight", "1.bias", "1.weight"], ["0.bias", "0.weight"]]
    assert plan(layers(8, 8, 8, 8), Fusion(bucket_mb=576 / MIB)) == by_two_layers
    assert plan(layers(2, 2, 2, 2), Fusion(num_layers=2)) == by_two_layers
    assert plan(layers(8, 8, 8), Fusion(bucket_mb=100 / MIB)) == [["1.bias"], ["1.weight"], ["0.bias"], ["0.weight"]]
    assert plan(layers(2, 2), Fusion()) == [["0.bias"], ["0.weight"]]


def test_never_across_dtypes_or_parameter_groups() -> None:
    """Alternating kinds keep a bucket of each open; a bucket is as ready as its last member."""
    module = layers(2, 2, 2, 2)
    module[1].bfloat16()
    weights, biases = [m.weight for m in module], [m.bias for m in module]
    optimizer = torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)
    assert plan(module, Fusion(bucket_mb=1), optimizer) == [
        ["1.bias"],
        ["1.weight"],
        ["2.bias", "0.bias"],
        ["2.weight", "0.weight"],
    ]


def test_several_optimizers_tied_unowned_and_unregistered_parameters() -> None:
    module = layers(2, 2, 2, 2)
    module[1].weight = module[0].weight
    outside = nn.Parameter(torch.zeros(3))
    first = torch.optim.SGD(module[0].parameters(), lr=0.1)
    second = torch.optim.SGD([module[1].bias, outside], lr=0.1)
    parameters = {p.name: p for p in collect_parameters(module, [first, second])}
    assert {name: p.group for name, p in parameters.items()} == {
        "0.weight": (0, 0),
        "0.bias": (0, 0),
        "1.bias": (1, 0),
        "2.weight": None,
        "2.bias": None,
        "optimizer1.group0.1": (1, 0),
    }
    assert parameters["0.weight"].layer == "0"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"bucket_mb": 0}, "bucket_mb"),
        ({"bucket_mb": -1.0}, "bucket_mb"),
        ({"num_layers": 0}, "num_layers"),
        ({"bucket_mb": 1, "num_layers": 1}, "not both"),
    ],
)
def test_bad_fusion(settings: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Fusion(**settings)  # type: ignore[arg-type]


def test_pack_and_unpack() -> None:
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(4, 4).t(), torch.randn(0)]
    bucket = Bucket(tensors)
    bucket.pack(tensors)
    for place, tensor in zip(bucket.places, tensors, strict=True):
        assert torch.equal(bucket.flat[place], flattened(tensor, like=tensor))
    assert [view.stride() for view in bucket.views] == [tensor.stride() for tensor in tensors]
    bucket.flat.mul_(2)
    doubled = [tensor * 2 for tensor in tensors]
    bucket.unpack(tensors)
    assert all(torch.equal(tensor, twice) for tensor, twice in zip(tensors, doubled, strict=True))


@pytest.mark.parametrize(
    "like", [torch.randn(4, 3).t(), torch.randn(2, 3, 4, 5)[:, 1:].transpose(1, 3), torch.randn(())]
)
def test_flattened_values_lie_as_those_of_the_other_tensor(like: torch.Tensor) -> None:
    """Whatever the order of their own in memory; ``shaped`` undoes it."""
    values = torch.arange(like.numel(), dtype=torch.float32).view(like.shape)
    flat = flattened(values, like)
    assert torch.equal(shaped(flat, like), values)
    assert shaped(flat, like).stride() == torch.empty_like(like).stride()
    assert flattened(shaped(flat, like), like).data_ptr() == flat.data_ptr(), "a view"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_every_place_is_aligned(dtype: torch.dtype) -> None:
    """What lies beside a tensor decides neither how a matrix product rounds nor how fast it is."""
    tensors = [torch.ones(numel, dtype=dtype) for numel in (1, 3, 0, 64, 65, 7)]
    bucket = Bucket(tensors)
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in bucket.views if view.numel())
    num_values = sum(tensor.numel() for tensor in tensors)
    bucket.pack(tensors)
    assert bucket.flat.sum() == num_values, "the gaps hold zeros"
    if dtype.is_floating_point:
        bucket.flat.fill_(math.nan)
        bucket.pack(tensors)
        assert bucket.flat.sum() == num_values, "also after what was not finite"
        bucket.flat.fill_(math.nan)
        for tensor in tensors:
            tensor.grad = tensor.clone()
        bucket.pack_gradients(tensors)
        assert bucket.flat.sum() == num_values


def test_buffers_that_the_module_replaces() -> None:
    module = nn.BatchNorm1d(2)
    read = buffer_reader(nn.Sequential(module, module))
    module.running_mean = torch.tensor([5.0, 6.0])
    assert [buffer.tolist() for buffer in read()] == [[5.0, 6.0], [1.0, 1.0], 0]


class Unfit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters())


@pytest.mark.parametrize(
    ("make", "optimizers", "words"),
    [
        (Unfit, [sgd], "complex"),
        (lambda: nn.LazyLinear(2), [lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1))])], "lazy"),
        (lambda: nn.Sequential(nn.Embedding(2, 2, sparse=True)), [sgd], "sparse"),
        # Its average would be taken at the steps of one of them only.
        (lambda: layers(2, 2), [sgd, lambda m: torch.optim.SGD([m[0].bias])], r"0\.bias is in several optimizers"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            [sgd],
            r"1\.weight is on meta, and 0\.weight on cpu",
        ),
        (lambda: layers(2, 2), [lambda m: torch.optim.LBFGS(m.parameters())], "LBFGS"),
    ],
    ids=["complex", "lazy", "sparse", "twice", "devices", "LBFGS"],
)
def test_what_cannot_be_trained_is_named(make: Any, optimizers: list[Any], words: str) -> None:
    module = make()
    with pytest.raises(ValueError, match=words):
        collect_parameters(module, [one(module) for one in optimizers])


@pytest.mark.parametrize("affine", [True, False])
def test_a_module_without_values_is_named(affine: bool) -> None:
    name = "Parameter 0.weight" if affine else "Buffer 0.running_mean"
    with pytest.raises(ValueError, match=f"{name} is on the meta device"):
        check_values(nn.Sequential(nn.BatchNorm1d(2, affine=affine, device="meta")))


def test_squared_norm() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.bfloat16)]
    expected = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert SquaredNorm(gradients).item() == pytest.approx(expected, rel=1e-6)
    assert SquaredNorm(gradients[:1]).item() == pytest.approx(gradients[0].double().square().sum().item(), rel=1e-6)
    assert SquaredNorm([]).item() == 0.0
    assert SquaredNorm([torch.tensor([1.5e19])] * 2).item() == pytest.approx(4.5e38, rel=1e-6), "beyond fp32"
    assert math.isinf(SquaredNorm([torch.tensor([math.inf])]).item())
    assert math.isnan(SquaredNorm([torch.tensor([math.nan])]).item())
