"""What people do in hooks of a Trainer between two steps is trained on as in a plain loop, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from tests.nightly.methods.test_habits import OF_DDP, OF_STATES
from tests.nightly.methods.test_habits import train as train_in_loop
from tests.support.case_table import Outcomes, launch_cases
from tests.support.habits import HABITS, STEPS, Loop, layers
from tests.support.harness import on_ranks
from tests.support.lightning_models import make_strategy, trainer

STRATEGIES: dict[str, dict[str, Any] | str] = {
    "ddp": "ddp_find_unused_parameters_true",
    "dear": {"name": "dear", "fusion": "buffer", "bucket_mb": 1e-3},
    "dear, sharded": {"name": "dear", "update": "sharded", "fusion": "buffer", "bucket_mb": 1e-3},
    "selsync": {"name": "selsync", "delta": 0.0, "aggregation": "gradients", "partition": "defdp"},
    "selsync, overlapped": {
        "name": "selsync",
        "delta": 0.0,
        "overlap": "forward",
        "partition": "defdp",
        "bucket_mb": 1e-3,
    },
    "local_sgd": {"name": "local_sgd", "period": 1, "lr_scale": 1.0},
    "parameter_server": {"name": "parameter_server", "policy": "sync"},
    "pipe_sgd": {"name": "pipe_sgd", "staleness": 0},
}
BETWEEN_STEPS = [name for name, habit in HABITS.items() if habit.instead is None and habit.after_backward is None]


class TrainerLoop(Loop):
    def __init__(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        super().__init__(module.model, optimizer)
        self._trainer = module.trainer

    def optimizer_state(self) -> dict[str, Any]:
        return self._trainer.strategy.optimizer_state(self.optimizer)


class Module(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.habit = layers(), HABITS[name].after_step

    def on_train_start(self) -> None:
        self.loop = TrainerLoop(self, self.trainer.optimizers[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loop.loss()

    def on_train_batch_end(self, *_: Any) -> None:
        self.loop.number += 1
        if self.habit is not None and self.loop.number < STEPS:
            self.habit(self.loop)
            self.trainer.strategy.optimizers = [self.loop.optimizer]

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(strategy: str, name: str, folder: Path) -> list[Tensor] | str:
    module = Module(name)
    fit = trainer(make_strategy(STRATEGIES[strategy]), 2, folder, max_steps=STEPS, max_epochs=1)
    try:
        fit.fit(module, DataLoader(range(2 * STEPS)))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return [weight.detach().clone() for weight in module.model.parameters()]


def refusal(strategy: str, name: str) -> str:
    """Returns words of the error by which it is refused; empty: it is trained."""
    if name == "replace the optimizer":
        return "SGD is not an optimizer that was passed to "
    of_states = strategy in ("dear", "dear, sharded", "parameter_server") and name in OF_STATES
    return "optimizer.state has nothing of it" if of_states else ""


@pytest.fixture(scope="module")
def expected() -> Outcomes:
    return launch_cases({name: partial(train_in_loop, "by hand", name, True) for name in BETWEEN_STEPS}, 2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("fits")
    pairs = [(strategy, name) for strategy in STRATEGIES for name in BETWEEN_STEPS]
    return launch_cases({pair: partial(train, *pair, folder) for pair in pairs}, 2, init=False, launch=on_ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", BETWEEN_STEPS)
def test_a_habit_in_a_hook_is_trained_on_or_refused(
    name: str, strategy: str, outcomes: Outcomes, expected: Outcomes
) -> None:
    if (name, strategy) == ("write through data", "parameter_server"):
        return  # documented: it is not seen
    if strategy == "ddp" and name in OF_DDP:
        return
    words = refusal(strategy, name) if strategy != "ddp" else ""
    for weights, of_hand in zip(outcomes[strategy, name], expected[name], strict=True):
        if words:
            assert isinstance(weights, str)
            assert words in weights
            continue
        assert not isinstance(weights, str), weights
        for one, other in zip(weights, of_hand, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
