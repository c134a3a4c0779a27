"""Parameters of every layout and type: they stay as they lie in memory, and are clipped by their whole norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync import DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.support.case_table import launch_cases
from tests.support.ea_pipe_runs import average_elastically
from tests.support.models import Averaged, batch

METHODS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "averaged": Averaged,
    "dear, replicated": lambda *trained: DeAR(*trained, update="replicated"),
    "dear, sharded": lambda *trained: DeAR(*trained, update="sharded", fusion="none"),
    "parameter_server": lambda *trained: ParameterServer(*trained, policy="sync"),
    "parameter_server, one": lambda *trained: ParameterServer(*trained, policy="sync", servers=1),
    "pipe_sgd": lambda *trained: PipeSGD(*trained, staleness=0),
    "selsync": lambda *trained: SelSync(*trained, delta=0.0, aggregation="gradients"),
    "local_sgd": lambda *trained: LocalSGD(*trained, warmup_steps=1000),
}


def strides_of(method: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns the strides of a channels_last convolution and of a transposed matrix: before a training, and after."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(45, 4))
    model[2].weight = nn.Parameter(torch.randn(45, 4).t())
    before = [parameter.stride() for parameter in model.parameters()]
    sync = METHODS[method](model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
        sync.step()
    sync.flush()
    sync.detach()
    return before, [parameter.stride() for parameter in model.parameters()]


def test_weights_lie_in_memory_as_before() -> None:
    """The speed of convolutions depends on it; what is trained is compared by the fuzzer, with each layout."""
    outcomes = launch_cases({method: partial(strides_of, method) for method in METHODS}, 2)
    for method in METHODS:
        for before, after in outcomes[method]:
            assert after == before, method


# --- types ------------------------------------------------------------------------------------------------------------

CLIP, CLIPPED_STEPS = 0.05, 4
#: Types of the first layer and of the last one; relative and absolute tolerance, the latter beside updates of 0.1.
DTYPES = {
    "fp64": (torch.float64, torch.float64, 1e-12, 1e-14),
    "fp32, fp64": (torch.float32, torch.float64, 1e-6, 1e-7),
    "fp64, fp32": (torch.float64, torch.float32, 1e-6, 1e-7),
    "fp32, bf16": (torch.float32, torch.bfloat16, 2e-2, 1e-3),  # torch takes norms of bf16 in bf16
}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def layers(dtypes: str) -> nn.Sequential:
    torch.manual_seed(0)
    first, last, *_ = DTYPES[dtypes]
    of_first, of_last = nn.Linear(6, 10, dtype=first), nn.Linear(10, 3, dtype=last)
    return nn.Sequential(Cast(first), of_first, nn.Tanh(), Cast(last), of_last)


sgd = partial(SGD, lr=0.5, momentum=0.9)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def assert_close(actual: list[Tensor], expected: list[Tensor], dtypes: str, **kwargs: Any) -> None:
    rtol, atol = DTYPES[dtypes][2:]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, **kwargs)


def train_types(dtypes: str, method: str) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and the norms before clipping."""
    model = layers(dtypes)
    sync = METHODS[method](model, sgd(model.parameters()))
    norms = []
    for i in range(CLIPPED_STEPS):
        model.zero_grad()
        x, y = batch(i, dist.get_rank())
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(sync.clip(CLIP))
        sync.step()
    sync.flush()
    sync.detach()
    return weights_of(model), norms


def test_clipping_averaged_gradients() -> None:
    """By their whole norm."""
    rows = list(product(DTYPES, ("averaged", "dear, replicated", "local_sgd", "selsync", "pipe_sgd")))
    outcomes = launch_cases({row: partial(train_types, *row) for row in rows}, 2)
    for dtypes, method in rows:
        expected, expected_norms = outcomes[dtypes, "averaged"][0]
        for weights, norms in outcomes[dtypes, method]:
            assert min(norms) > CLIP
            assert_close(weights, expected, dtypes)
            assert_close(norms, expected_norms, dtypes, check_dtype=False)


def clipped_update(scale: float, model: nn.Module, optimizer: Optimizer, t: int) -> None:
    x, y = batch(t, 0)
    optimizer.zero_grad()
    (scale * nn.functional.cross_entropy(model(x), y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def by_hand(dtypes: str, algorithm: str, scale: float = 1.0) -> list[Tensor]:
    """Elastic averaging of replicas, each of whose gradients is clipped as a whole; or one that is trained plainly."""
    make, make_optimizer = partial(layers, dtypes), lambda model: sgd(model.parameters())
    if algorithm == "ea_pipe":
        update = partial(clipped_update, scale)
        return weights_of(average_elastically(make, make_optimizer, update, CLIPPED_STEPS, 0.5))
    model = make()
    optimizer = make_optimizer(model)
    for t in range(CLIPPED_STEPS):
        clipped_update(scale, model, optimizer, t)
    return weights_of(model)


def train_pipeline(dtypes: str, scale: float = 1.0, **settings: Any) -> list[Tensor]:
    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return scale * nn.functional.cross_entropy(output, target)

    model = layers(dtypes)
    engine = EAPipe(model, scaled, sgd, split=(3,), clip_norm=CLIP, **settings)
    for t in range(CLIPPED_STEPS):
        engine.train_batch(batch(t, 0))
    engine.gather()
    engine.detach()
    return weights_of(model)


def test_clipping_over_stages_of_other_types() -> None:
    rows = list(product(DTYPES, ("ea_pipe", "gpipe")))
    outcomes = launch_cases({(dtypes, one): partial(train_pipeline, dtypes, algorithm=one) for dtypes, one in rows}, 2)
    for dtypes, algorithm in rows:
        for weights in outcomes[dtypes, algorithm]:
            assert_close(weights, by_hand(dtypes, algorithm), dtypes)


@pytest.mark.parametrize("dtypes", ["fp32, fp64"])
def test_a_norm_is_not_rounded_on_its_way(dtypes: str) -> None:
    """Its square is far beyond what fp16 holds, as which activations travel; all stages clip by the same norm."""
    weights = train_pipeline(dtypes, 1e4, compression="fp16", virtual_stages=2)
    torch.testing.assert_close(weights, by_hand(dtypes, "ea_pipe", 1e4), rtol=1e-2, atol=1e-3)
