"""Plain loops over models in fp64, and with parameters of several types, clipped by their whole norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync import DeAR, EAPipe, LocalSGD, PipeSGD, SelSync
from tests.support.harness import on_ranks
from tests.support.models import Averaged, batch

CLIP = 0.05
NUM_STEPS = 4
#: Types of the first layer and of the last one.
DTYPES = {
    "fp64": (torch.float64, torch.float64),
    "fp32, fp64": (torch.float32, torch.float64),
    "fp64, fp32": (torch.float64, torch.float32),
    "fp32, bf16": (torch.float32, torch.bfloat16),
}
#: Relative and absolute tolerance, the latter beside updates of 0.1; torch takes norms of bf16 in bf16.
TOLERANCES = {
    "fp64": (1e-12, 1e-14),
    "fp32, fp64": (1e-6, 1e-7),
    "fp64, fp32": (1e-6, 1e-7),
    "fp32, bf16": (2e-2, 1e-3),
}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def layers(dtypes: str) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = DTYPES[dtypes]
    return nn.Sequential(
        Cast(first), nn.Linear(6, 10, dtype=first), nn.Tanh(), Cast(last), nn.Linear(10, 3, dtype=last)
    )


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=0.5, momentum=0.9)


METHODS: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "averaged": Averaged,
    "DeAR": DeAR,
    "Local SGD": lambda model, optimizer: LocalSGD(model, optimizer, warmup_steps=NUM_STEPS),
    "SelSync": lambda model, optimizer: SelSync(model, optimizer, delta=0.0, aggregation="gradients"),
    "Pipe-SGD": lambda model, optimizer: PipeSGD(model, optimizer, staleness=0),
}


def assert_close(actual: list[Tensor], expected: list[Tensor], dtypes: str, **kwargs: Any) -> None:
    rtol, atol = TOLERANCES[dtypes]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, **kwargs)


def train(dtypes: str, method: str) -> tuple[list[Tensor], list[Tensor]]:
    """The weights, and the norms before clipping."""
    model = layers(dtypes)
    sync = METHODS[method](model, sgd(model.parameters()))
    norms = []
    for i in range(NUM_STEPS):
        model.zero_grad()
        x, y = batch(i, dist.get_rank())
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(sync.clip(CLIP))
        sync.step()
    sync.flush()
    sync.detach()
    return [parameter.detach() for parameter in model.parameters()], norms


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("method", list(METHODS)[1:])
def test_clipping_averaged_gradients(method: str, dtypes: str) -> None:
    expected, expected_norms = on_ranks(train, 2, dtypes, "averaged")[0]
    for weights, norms in on_ranks(train, 2, dtypes, method):
        assert min(norms) > CLIP
        assert_close(weights, expected, dtypes)
        assert_close(norms, expected_norms, dtypes, check_dtype=False)


def replicas_by_hand(dtypes: str, scale: float, number: int = 2, force: float = 0.5) -> list[Tensor]:
    """Elastic averaging of replicas, each of whose gradients is clipped as a whole; one without force is plain."""
    master, replicas = layers(dtypes), [layers(dtypes) for _ in range(number)]
    optimizers = [sgd(replica.parameters()) for replica in replicas]
    for t in range(NUM_STEPS):
        replica, optimizer = replicas[t % number], optimizers[t % number]
        x, y = batch(t, 0)
        optimizer.zero_grad()
        (scale * nn.functional.cross_entropy(replica(x), y)).backward()
        nn.utils.clip_grad_norm_(replica.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for p, center in zip(replica.parameters(), master.parameters(), strict=True):
                difference = p - center
                p -= force * difference
                center += force * difference
    return [parameter.detach() for parameter in (master if number > 1 else replicas[0]).parameters()]


def plain_by_hand(dtypes: str, scale: float) -> list[Tensor]:
    return replicas_by_hand(dtypes, scale, number=1, force=0.0)


def train_pipeline(dtypes: str, scale: float, settings: dict[str, Any]) -> list[Tensor]:
    model = layers(dtypes)
    engine = EAPipe(
        model,
        lambda output, target: scale * nn.functional.cross_entropy(output, target),
        sgd,
        split=(3,),
        clip_norm=CLIP,
        **settings,
    )
    for t in range(NUM_STEPS):
        engine.train_batch(batch(t, 0))
    engine.gather()
    engine.detach()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("algorithm", "by_hand"), [("ea_pipe", replicas_by_hand), ("gpipe", plain_by_hand)])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_clipping_over_stages_of_other_types(dtypes: str, algorithm: str, by_hand: Any) -> None:
    for weights in on_ranks(train_pipeline, 2, dtypes, 1.0, {"algorithm": algorithm}):
        assert_close(weights, by_hand(dtypes, 1.0), dtypes)


def test_a_norm_is_not_rounded_on_its_way() -> None:
    """Its square is far beyond what fp16 holds, as which activations travel; all stages clip by the same norm."""
    weights = train_pipeline("fp32, fp64", 1e4, {"compression": "fp16", "virtual_stages": 2})
    torch.testing.assert_close(weights, replicas_by_hand("fp32, fp64", 1e4), rtol=1e-2, atol=1e-3)
