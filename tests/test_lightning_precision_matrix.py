"""Every method in all of a precision's types, and what is applied to the weights, clipped and not.

The conformance suite has 32-true and bf16-mixed.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipesync import (
    DeARStrategy,
    EAPipeStrategy,
    LocalSGDStrategy,
    ParameterServerStrategy,
    PipeSGDStrategy,
    SelSyncStrategy,
)
from tests.harness import launch
from tests.lightning_models import Classifier, scaling, train_loader, trainer

#: By precision, the types of the weights and of what is computed with them.
PRECISIONS = {
    "64-true": (torch.float64, torch.float64),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16),
    "16-mixed": (torch.float32, torch.float16),
}
CLIP = 0.01
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": CLIP},
    "value": {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
}
#: Where a gradient is applied as it is, too.
UNCLIPPED = ("64-true", "16-mixed")
NUM_STEPS, ACCUMULATE = 3, 2


class RecordingSGD(torch.optim.SGD):
    """It records the gradients that it applies; copies of it, which DeAR makes, record them in the same list."""

    applied: list[Tensor]

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.applied.append(torch.cat(gradients))
        super().step()
        return result


class Recorded(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = RecordingSGD(self.parameters(), lr=0.5, momentum=0.9)
        optimizer.applied = self.applied = []
        return optimizer


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "DeAR": lambda: DeARStrategy(update="sharded", elementwise=(RecordingSGD,)),
    "DeAR, replicated": lambda: DeARStrategy(update="replicated"),
    "SelSync, gradients": lambda: SelSyncStrategy(delta=0.0, aggregation="gradients", partition="defdp"),
    "SelSync, parameters": lambda: SelSyncStrategy(partition="defdp"),
    "local SGD": lambda: LocalSGDStrategy(period=2),
    "local SGD, warm-up": lambda: LocalSGDStrategy(warmup_steps=1000),
    "servers": lambda: ParameterServerStrategy(elementwise=(RecordingSGD,)),
    "servers, synchronous": lambda: ParameterServerStrategy(policy="sync", elementwise=(RecordingSGD,)),
    "Pipe-SGD, synchronous": lambda: PipeSGDStrategy(staleness=0),
    "Pipe-SGD": PipeSGDStrategy,
    "EA-Pipe": lambda: EAPipeStrategy(split=(2,)),
}
EXACT = (
    "DeAR",
    "DeAR, replicated",
    "SelSync, gradients",
    "local SGD, warm-up",
    "servers, synchronous",
    "Pipe-SGD, synchronous",
)
#: Of these, those that sum the gradient's norm in another order.
SHARDED = ("DeAR", "DeAR, replicated", "servers, synchronous")
#: Each rank applies a part of the gradient.
DIVIDED = ("DeAR", "EA-Pipe", "servers", "servers, synchronous")

#: The method, and how it clips.
Case = tuple[str, str]


def fit(directory: Path, precision: str, case: Case) -> tuple[Tensor, list[Tensor]]:
    """The weights, and the gradients that were applied on this rank."""
    method, clipping = case
    torch.manual_seed(0)
    model = Recorded()
    how = {"plugins": [scaling()]} if precision == "16-mixed" else {"precision": precision}
    run = trainer(
        STRATEGIES[method](),
        2,
        directory,
        max_epochs=1,
        limit_train_batches=NUM_STEPS * ACCUMULATE,
        accumulate_grad_batches=ACCUMULATE,
        **how,
        **CLIPPING[clipping],
    )
    run.fit(model, train_loader())
    return model.weights(), model.applied


def fit_all(directory: Path, precision: str) -> dict[Case, tuple[Tensor, list[Tensor]]]:
    clippings = [kind for kind in CLIPPING if kind != "none" or precision in UNCLIPPED]
    cases = itertools.product(STRATEGIES, clippings)
    refused = ("EA-Pipe", "16-mixed")  # by name: see the tests of EA-Pipe
    return {case: fit(directory, precision, case) for case in cases if (case[0], precision) != refused}


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_every_method_trains(precision: str, tmp_path: Path) -> None:
    """Exact methods are DDP, all others end with equal weights; what is applied is clipped as one gradient."""
    ranks = launch(fit_all, 2, tmp_path, precision, init=False)
    dtype, computed = PRECISIONS[precision]
    eps, initial = torch.finfo(computed).eps, Classifier().weights()
    for case, (weights, _) in ranks[0].items():
        method, clipping = case
        assert weights.dtype == dtype, case
        assert weights.isfinite().all(), case
        assert not torch.equal(weights, initial.to(dtype)), case
        assert torch.equal(weights, ranks[1][case][0]), case
        check_applied([rank[case][1] for rank in ranks], case, eps)
        expected = ranks[0]["ddp", clipping][0]
        if method in SHARDED and clipping == "norm":  # of shards, and never in 16 bits, as DDP's may be
            torch.testing.assert_close(weights, expected, rtol=2 * eps, atol=2 * eps * NUM_STEPS * CLIP)
        elif method in EXACT:
            assert torch.equal(weights, expected), case


def check_applied(of_ranks: list[list[Tensor]], case: Case, eps: float) -> None:
    """Asserts that as many gradients were applied as there are steps, each of them clipped as a whole."""
    method, clipping = case
    if method in DIVIDED:
        gradients = [torch.cat(parts) for parts in zip(*of_ranks, strict=True)]
    else:
        gradients = [gradient for of_rank in of_ranks for gradient in of_rank]
    num_updates = NUM_STEPS - (method == "Pipe-SGD")
    assert len(gradients) == num_updates * (1 if method in DIVIDED else 2), case
    for gradient in gradients:
        norm, largest = float(gradient.double().norm()), float(gradient.abs().max())
        if clipping == "norm":
            assert norm == pytest.approx(CLIP, rel=max(2 * eps, 1e-4)), case  # torch adds 1e-6 to the norm
        elif clipping == "value":
            assert largest == float(torch.tensor(CLIP, dtype=gradient.dtype)), case
        else:
            assert largest > CLIP, case
