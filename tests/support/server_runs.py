"""A rank that trains with parameter servers, as the tests of all its policies need it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import ParameterServer
from tests.support.models import Run, assert_same, seeded_mlp


class ServedRun(Run):
    """A network that this rank trains, or serves."""

    def __init__(self, optimizer: str = "sgd", *, seed: int = 0, batch_norm: bool = False, **settings: Any) -> None:
        super().__init__(ParameterServer, optimizer, seeded_mlp(seed, batch_norm), **{"timeout_s": 60, **settings})
        self.rank = dist.get_rank()

    def step(self, number: int, pauses: Sequence[float] = (0.0,)) -> None:
        """Takes a step, and pauses in it at random, not as in another run."""
        self.backward(number)
        time.sleep(random.Random().choice(pauses))
        self.sync.step()

    def train(self, numbers: Iterable[int], pauses: Sequence[float] = (0.0,)) -> None:
        """Takes steps, if this rank is one that trains."""
        for number in () if self.sync.only_serves else numbers:
            self.step(number, pauses)


def assert_weights(of_ranks: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
    """Asserts that each rank has the expected values bit for bit."""
    for weights in of_ranks:
        assert_same(weights, expected)
