"""Parameters in every layout and type: channels_last, transposed, 0-dim, empty; fp64, bf16, and several in a model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer

from lightning_pipesync import DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync
from tests.support.case_table import launch_cases
from tests.support.ea_pipe_runs import average_elastically
from tests.support.models import Averaged, batch

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
#: Adafactor looks at whole parameters, of which servers or shards of these methods have a part.
LAID_OUT = [
    (optimizer, method)
    for optimizer, method in product(OPTIMIZERS, METHODS)
    if optimizer != "adafactor" or method not in ("dear, sharded", "parameter_server")
]


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


def train_layouts(optimizer_name: str, method: str) -> dict[str, Any]:
    """Trains with averaged gradients, then with a method; returns the weights, their states and how they lie."""
    saved: dict[str, Any] = {}
    for kind, first in ((Averaged, 0), (METHODS[method], STEPS)):
        torch.manual_seed(0)
        model = Layouts(num_rows=0 if optimizer_name == "adafactor" else 3)
        optimizer = OPTIMIZERS[optimizer_name](model)
        if saved:
            model.load_state_dict(saved["weights"])
            optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["state"]})
        sync = kind(model, optimizer)
        for step in range(first, first + STEPS):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x, y = torch.randn(6, 3, 5, 5, generator=generator), torch.randint(4, (6,), generator=generator)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sync.step()
        sync.flush()
        saved = deepcopy({"weights": model.state_dict(), "state": sync.optimizer_state_dict(optimizer)["state"]})
        saved["strides"] = {name: parameter.stride() for name, parameter in model.named_parameters()}
        sync.detach()
    return saved


def test_weights_and_states_are_those_of_a_plain_loop() -> None:
    """And so is the order in which weights lie in memory, on which the speed of convolutions depends."""
    outcomes = launch_cases({row: partial(train_layouts, *row) for row in LAID_OUT}, 2)
    for row in LAID_OUT:
        expected = outcomes[row[0], "averaged"][0]
        for actual in outcomes[row]:
            torch.testing.assert_close(actual["weights"], expected["weights"])
            torch.testing.assert_close(actual["state"], expected["state"])
            assert actual["strides"] == expected["strides"], row


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
