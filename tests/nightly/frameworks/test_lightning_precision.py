"""Every method once in each type of weights, clipped in one way or not.

The conformance suite has 32-true and the mixed precisions; that a gradient is clipped as a whole in any type is tested
in plain loops.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer

PRECISIONS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
CLIP = 0.01
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": CLIP},
    "value": {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
}
NUM_STEPS, ACCUMULATE = 3, 2

#: With settings that are DDP's.
EXACT: dict[str, dict[str, Any]] = {
    "DeAR": {"name": "dear", "update": "sharded"},
    "DeAR, replicated": {"name": "dear", "update": "replicated"},
    "SelSync, gradients": {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"},
    "local SGD, warm-up": {"name": "local_sgd", "warmup_steps": 1000},
    "servers, synchronous": {"name": "parameter_server", "policy": "sync"},
    "Pipe-SGD, synchronous": {"name": "pipe_sgd", "staleness": 0},
}
STRATEGIES = {
    **EXACT,
    "SelSync, parameters": {"partition": "defdp"},
    "local SGD": {"name": "local_sgd", "period": 2},
    "servers": {"name": "parameter_server"},
    "Pipe-SGD": {"name": "pipe_sgd"},
    "EA-Pipe": {"name": "ea_pipe", "split": (2,)},
}
#: Of these, those that sum the gradient's norm in another order.
SHARDED = ("DeAR", "DeAR, replicated", "servers, synchronous")


class Fast(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def fit(directory: Path, precision: str, method: str, clipping: str) -> Tensor:
    torch.manual_seed(0)
    model = Fast()
    run = trainer(
        make_strategy("ddp" if method == "ddp" else STRATEGIES[method]),
        2,
        directory,
        max_epochs=1,
        limit_train_batches=NUM_STEPS * ACCUMULATE,
        accumulate_grad_batches=ACCUMULATE,
        precision=precision,
        **CLIPPING[clipping],
    )
    run.fit(model, train_loader())
    return model.weights()


def clipping_of(precision: str, method: str) -> str:
    """Each method clips in another way in another precision, and each precision sees all ways."""
    return list(CLIPPING)[(list(PRECISIONS).index(precision) + list(STRATEGIES).index(method)) % len(CLIPPING)]


#: A precision, a method, and how it clips.
CASES = [(precision, method, clipping_of(precision, method)) for precision in PRECISIONS for method in STRATEGIES]
OF_DDP = sorted({(precision, "ddp", clipping) for precision, method, clipping in CASES if method in EXACT})


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    return launch_cases({case: partial(fit, folder, *case) for case in [*OF_DDP, *CASES]}, 2, init=False)


@pytest.mark.parametrize(("precision", "method", "clipping"), CASES)
def test_every_method_trains(precision: str, method: str, clipping: str, trained: Outcomes) -> None:
    """Exact methods are DDP, all others end with equal weights."""
    weights, other = trained[precision, method, clipping]
    dtype = PRECISIONS[precision]
    eps = torch.finfo(dtype).eps
    assert weights.dtype == dtype
    assert weights.isfinite().all()
    assert not torch.equal(weights, Classifier().weights().to(dtype))
    assert torch.equal(weights, other)
    if method not in EXACT:
        return
    expected = trained[precision, "ddp", clipping][0]
    if method in SHARDED and clipping == "norm":  # of shards, and never in 16 bits, as DDP's may be
        torch.testing.assert_close(weights, expected, rtol=2 * eps, atol=2 * eps * NUM_STEPS * CLIP)
    else:
        assert torch.equal(weights, expected)
