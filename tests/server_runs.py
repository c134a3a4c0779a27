"""A rank that trains with parameter servers, as the tests of all its policies need it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import ParameterServer
from tests.models import OPTIMIZERS, loss, seeded_mlp, state


class ServedRun:
    """The model, optimizer and method of this rank."""

    def __init__(self, optimizer: str = "sgd", *, seed: int = 0, batch_norm: bool = False, **settings: Any) -> None:
        self.rank = dist.get_rank()
        self.model = seeded_mlp(seed, batch_norm)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.sync = ParameterServer(self.model, self.optimizer, **{"timeout_s": 60, **settings})

    def step(self, i: int, pauses: Sequence[float] = (0.0,)) -> None:
        """Takes step `i`, and pauses in it at random, not as in another run."""
        self.optimizer.zero_grad()
        loss(self.model, i, self.rank).backward()
        time.sleep(random.Random().choice(pauses))
        self.sync.step()

    def train(self, steps: Iterable[int], pauses: Sequence[float] = (0.0,)) -> None:
        """Takes steps, if this rank is one that trains."""
        for i in () if self.sync.only_serves else steps:
            self.step(i, pauses)

    def finish(self, timeout_s: float = 10.0) -> dict[str, Tensor]:
        """Returns the weights after a flush."""
        self.sync.flush()
        weights = state(self.model)
        self.sync.detach(timeout_s)
        return weights


def assert_weights(of_ranks: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
    """Asserts that each rank has the expected values bit for bit."""
    for weights in of_ranks:
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
