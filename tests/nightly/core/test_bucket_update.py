"""A step on a whole bucket: what the optimizer does to each parameter, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.methods.gradients.bucket_update import BucketUpdate, Piece
from lightning_pipesync.methods.gradients.reshard import whole_state

SHAPES = [(7, 3), (1,), (257,), (4, 4, 5), (100, 31)]
STEPS = 6

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "foreach": (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "Adam": (Adam, {"amsgrad": True}),
    "AdamW": (AdamW, {}),
    "RMSprop": (RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (Adagrad, {}),
    "NAdam": (NAdam, {}),
    "RAdam": (RAdam, {}),
    "Adamax": (Adamax, {}),
    "ASGD": (ASGD, {}),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def gradients(step: int, like: Sequence[Tensor], missing: Sequence[int] = ()) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for tensor in like]
    return [None if index in missing else gradient for index, gradient in enumerate(drawn)]


class InBucket:
    """Parameters in a bucket, and their update."""

    def __init__(self, own: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.values, self.gradients = Bucket(own), Bucket(own)
        self.values.pack(own)
        rows = zip(own, self.values.views, self.gradients.views, strict=True)
        pieces = [Piece(i, str(i), *row, None) for i, row in enumerate(rows)]
        self.update = BucketUpdate(optimizer, 0, pieces, self.values.flat, self.gradients.flat)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        given = zip(self.values.views, gradients, strict=True)
        self.gradients.pack([torch.zeros_like(view) if own is None else own for view, own in given])
        self.update.apply([gradient is not None for gradient in gradients])

    @property
    def tensors_in_a_step(self) -> int:
        return len(self.update._copy.param_groups[0]["params"])


def check_equal(bucket: InBucket, own: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Asserts that values and states are those of the optimizer's own steps, bit for bit."""
    states = bucket.update.states()
    for index, (parameter, view) in enumerate(zip(own, bucket.values.views, strict=True)):
        torch.testing.assert_close(view, parameter.detach(), rtol=0, atol=0)
        expected = optimizer.state.get(parameter, {})
        state = states.get(str(index), {})
        assert state.keys() == expected.keys()
        for kind, value in expected.items():
            torch.testing.assert_close(whole_state(state[kind], parameter), value, rtol=0, atol=0)


def train(
    bucket: InBucket, own: Sequence[Tensor], optimizer: Optimizer, steps: range, missing: Sequence[int] = ()
) -> None:
    for step in steps:
        drawn = gradients(step, own, missing)
        for parameter, gradient in zip(own, drawn, strict=True):
            parameter.grad = gradient
        optimizer.step()
        bucket.step(drawn)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_the_whole_bucket_is_one_on_each_parameter(name: str) -> None:
    optimizer_type, settings = OPTIMIZERS[name]
    own = parameters()
    optimizer = optimizer_type(own, **settings)
    bucket = InBucket(own, optimizer)

    train(bucket, own, optimizer, range(STEPS))
    assert bucket.tensors_in_a_step == 1
    check_equal(bucket, own, optimizer)

    # A bucket made from these values and states goes on, as after a change of the buckets or a checkpoint.
    resumed = InBucket(own, optimizer)
    assert resumed.tensors_in_a_step == 1
    resumed.update.load_states(bucket.update.states())
    train(resumed, own, optimizer, range(STEPS, 2 * STEPS))
    assert resumed.tensors_in_a_step == 1
    check_equal(resumed, own, optimizer)

    # Without a gradient neither a value nor its state changes; from then on the parameters differ in their steps.
    train(resumed, own, optimizer, range(2 * STEPS, 2 * STEPS + 1), missing=[1, 3])
    assert resumed.tensors_in_a_step == len(SHAPES)
    train(resumed, own, optimizer, range(2 * STEPS + 1, 3 * STEPS))
    check_equal(resumed, own, optimizer)


def test_parameters_with_states_of_different_steps_are_updated_one_by_one() -> None:
    own = parameters()
    optimizer = AdamW(own)
    optimizer.state[own[0]] = {"step": torch.tensor(3.0), "exp_avg": own[0] * 0.1, "exp_avg_sq": own[0].square()}
    bucket = InBucket(own, optimizer)
    assert bucket.tensors_in_a_step == len(SHAPES)
    train(bucket, own, optimizer, range(STEPS))
    check_equal(bucket, own, optimizer)


@pytest.mark.parametrize(
    ("dtype", "settings", "shape"),
    [(torch.bfloat16, {}, (3,)), (torch.float32, {"fused": True}, (3,)), (torch.float32, {}, ())],
    ids=["half precision", "fused", "0-dim"],
)
def test_what_rounds_in_another_way_is_updated_one_by_one(
    dtype: torch.dtype, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    own = [*parameters(dtype), nn.Parameter(torch.ones(shape, dtype=dtype))]
    optimizer = AdamW(own, **settings)
    bucket = InBucket(own, optimizer)
    train(bucket, own, optimizer, range(STEPS))
    assert bucket.tensors_in_a_step == len(own)
    check_equal(bucket, own, optimizer)
