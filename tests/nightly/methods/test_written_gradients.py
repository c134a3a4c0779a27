"""What is written to ``p.grad`` after it was sent would be lost, and is refused; a gradient may be read.

That clipping, masking and replacing gradients is refused, where each rank does it, is among the habits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import DeAR, PipeSGD
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.method_runs import SMALL
from tests.support.models import Run, assert_same, loss, state, train_ddp

Write = Callable[[Run], object]

#: DeAR sends gradients in the backward pass, and so does Pipe-SGD at level 2; at level 1 with the step.
METHODS: dict[str, partial[Any]] = {
    "dear": partial(DeAR, **SMALL),
    "pipe_sgd, level 2": partial(PipeSGD, pipeline_level=2),
    "pipe_sgd, level 1": partial(PipeSGD, pipeline_level=1),
}


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


def clip_after_the_methods_clipping(run: Run) -> None:
    run.sync.clip(1e9)
    clip(run)


def write_anew(run: Run) -> None:
    run.model[0].weight.grad = torch.zeros_like(run.model[0].weight)


def write_none(run: Run) -> None:
    run.model.zero_grad()


def add_without_sync(run: Run) -> None:
    with run.sync.no_sync():
        loss(run.model, 5, dist.get_rank()).backward()


def compute_anew_without_sync(run: Run) -> None:
    """The new gradients may be where the old ones were in memory."""
    run.optimizer.zero_grad()
    add_without_sync(run)


def read(run: Run) -> None:
    assert all(float(parameter.grad.norm()) > 0 for parameter in run.model.parameters())


#: Each before a step of its own; Pipe-SGD averages in `clip`, and what is written afterwards counts.
ROWS: list[tuple[str, Write]] = [
    *((method, write) for write in (clip, write_anew, add_without_sync, read) for method in METHODS),
    ("dear", clip_after_the_methods_clipping),
    ("dear", compute_anew_without_sync),
]


def train(
    method: str, write: Write, on: tuple[int, ...] = (0, 1), timeout_s: float = 60
) -> tuple[tuple[str, str] | None, dict[str, Tensor]]:
    """Returns the error of a step before which something is written, and the state of the model."""
    run = Run(METHODS[method], timeout_s=timeout_s)

    def step() -> None:
        run.sync.step()
        run.sync.flush()

    run.steps(range(4))
    run.backward(4)
    if dist.get_rank() in on:
        write(run)
    error = raised(step)
    run.sync.detach()
    return error, state(run.model)


def test_what_would_be_lost_is_refused() -> None:
    cases: dict[Any, Any] = {row: partial(train, *row) for row in ROWS}
    outcomes = launch_cases({**cases, "ddp": partial(train_ddp, "sgd", 5)}, 2)
    for method, write in ROWS:
        for error, weights in outcomes[method, write]:
            if write is read or method == "pipe_sgd, level 1":
                assert error is None
            else:
                way_out = "no_sync()" if method == "dear" else "or use pipeline_level=1"
                assert_raised(error, "RuntimeError", "was written to", way_out)
            if (method, write) == ("dear", read):
                assert_same(weights, outcomes["ddp"][0])


def test_a_rank_that_alone_writes_is_named() -> None:
    for write, writer in ((write_anew, 1), (write_none, 0)):
        errors = [error for error, _ in on_ranks(train, 2, "dear", write, (writer,), 10)]  # it detaches: no news of it
        assert_raised(errors[writer], "RuntimeError", "was written to after the backward pass")
        assert_raised(errors[1 - writer], "RuntimeError", f"Rank {writer} ")
