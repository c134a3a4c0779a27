"""Parameters in every layout: channels_last, transposed, 0-dim, empty; with an optimizer's state from before."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.support.harness import on_ranks
from tests.support.models import Averaged

STEPS = 3  # before the method is attached, and with it

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "fused adamw": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "fused adam, amsgrad": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True, fused=True),
    "fused adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, fused=True),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.1),
}

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

#: Those whose servers or shards have a part of a parameter.
SHARDED = ("dear, sharded", "parameter_server")


class Layouts(nn.Module):
    """A network whose parameters lie in memory in different orders.

    Args:
        num_rows: of a parameter without columns, which some optimizers cannot step.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.ParameterList([torch.zeros(num_rows, 0)] * bool(num_rows))

    def forward(self, x: Tensor) -> Tensor:
        features = self.convolution(x.to(memory_format=torch.channels_last)).tanh().mean(dim=(2, 3))
        return (features @ self.transposed.t()) * self.scale.exp() + sum(one.sum() for one in self.empty)


def network(optimizer_name: str) -> Layouts:
    torch.manual_seed(0)
    return Layouts(num_rows=0 if optimizer_name == "adafactor" else 3)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x, y = torch.randn(6, 3, 5, 5, generator=generator), torch.randint(4, (6,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def train(optimizer_name: str, method: str) -> dict[str, Any]:
    """Trains with averaged gradients, then with a method; returns the weights, their states and how they lie."""
    model = network(optimizer_name)
    optimizer = OPTIMIZERS[optimizer_name](model)
    for kind, first in ((Averaged, 0), (METHODS[method], STEPS)):
        sync = kind(model, optimizer)
        for step in range(first, first + STEPS):
            backward(model, step)
            sync.step()
        sync.flush()
        state = deepcopy(sync.optimizer_state_dict(optimizer)["state"])
        weights = deepcopy(model.state_dict())
        strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
        sync.detach()
        if first == 0:
            model = network(optimizer_name)
            model.load_state_dict(weights)
            optimizer = OPTIMIZERS[optimizer_name](model)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return {"weights": weights, "state": state, "strides": strides}


@cache
def trained_plainly(optimizer: str) -> dict[str, Any]:
    return on_ranks(train, 2, optimizer, "averaged")[0]


@pytest.mark.parametrize(
    ("optimizer", "method"),
    # Adafactor looks at whole parameters.
    [(o, m) for o in OPTIMIZERS for m in list(METHODS)[1:] if o != "adafactor" or m not in SHARDED],
)
def test_weights_and_states_are_those_of_a_plain_loop(optimizer: str, method: str) -> None:
    """And so is the order in which weights lie in memory, on which the speed of convolutions depends."""
    expected = trained_plainly(optimizer)
    for actual in on_ranks(train, 2, optimizer, method):
        torch.testing.assert_close(actual["weights"], expected["weights"])
        torch.testing.assert_close(actual["state"], expected["state"])
        assert actual["strides"] == expected["strides"]
