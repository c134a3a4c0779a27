"""The text of Python's documentation, character by character, with Muon for the matrices of the hidden layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.tasks.task import Task
from benchmarks.tasks.topics import topics

#: Learning rates of Muon, and of AdamW for the rest, as in the task ``topics``.
_OF_MUON, _OF_ADAMW = 0.02, 3e-3


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of a Transformer's hidden layers; AdamW for embeddings, output, norms and biases.

    One optimizer, whose groups are those of both.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        hidden = {name for name, parameter in named if ".layers." in f".{name}" and parameter.dim() == 2}
        self._parts = (
            Muon([parameter for name, parameter in named if name in hidden], lr=_OF_MUON, weight_decay=0.0),
            AdamW([parameter for name, parameter in named if name not in hidden], lr=_OF_ADAMW),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def topics_muon() -> Task:
    """Returns the task ``topics`` with another optimizer."""

    def schedule(optimizer: Optimizer, steps: int) -> OneCycleLR:
        rates = [_OF_MUON, _OF_ADAMW]
        return OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False)

    return replace(topics(), name="topics_muon", optimizer=MuonAndAdamW, scheduler=schedule)
