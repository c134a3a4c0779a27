"""Habits between two steps, in hooks of a Trainer: trained on as in a plain loop, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync import ParameterServerStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.habit_runs import LOST, OF_DDP, SERVERS, assert_trained, refusal
from tests.support.habit_runs import train as train_in_loop
from tests.support.habits import HABITS, STEPS, Loop, layers
from tests.support.harness import on_ranks, raised
from tests.support.lightning_models import make_strategy, trainer
from tests.support.method_runs import SYNCHRONOUS, synchronous_strategy

STRATEGIES = ["ddp", *SYNCHRONOUS]
BETWEEN_STEPS = [name for name, habit in HABITS.items() if habit.instead is None and habit.after_backward is None]


def places(strategy: int, name: int) -> list[bool]:
    """Returns whether a habit is in ``training_step``, within the optimizer's step, or after the batch: in turns.

    Servers have both: their learners send what a closure has written.
    """
    if BETWEEN_STEPS[name] == "replace the optimizer":
        return [False]
    return [False, True] if STRATEGIES[strategy] in SERVERS else [(strategy + name) % 2 == 1]


CASES = [
    (strategy, name, in_step)
    for i, strategy in enumerate(STRATEGIES)
    for j, name in enumerate(BETWEEN_STEPS)
    for in_step in places(i, j)
]


class TrainerLoop(Loop):
    def __init__(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        super().__init__(module.model, optimizer)
        self._trainer = module.trainer

    def optimizer_state(self) -> dict[str, Any]:
        return self._trainer.strategy.optimizer_state(self.optimizer)


class Module(pl.LightningModule):
    def __init__(self, name: str, in_step: bool) -> None:
        super().__init__()
        self.model, self.habit, self.in_step = layers(), HABITS[name].after_step, in_step

    def on_train_start(self) -> None:
        self.loop = TrainerLoop(self, self.trainer.optimizers[0])

    def act(self) -> None:
        if self.habit is not None and 0 < self.loop.number < STEPS:
            self.habit(self.loop)
            self.trainer.strategy.optimizers = [self.loop.optimizer]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.in_step:
            self.act()
        return self.loop.loss()

    def on_train_batch_end(self, *_: Any) -> None:
        self.loop.number += 1
        if not self.in_step:
            self.act()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(strategy: str, name: str, in_step: bool, folder: Path) -> list[Tensor] | str:
    module = Module(name, in_step)
    of_ddp = "ddp_find_unused_parameters_true"
    made = make_strategy(of_ddp if strategy == "ddp" else synchronous_strategy(strategy))
    fit = trainer(made, 2, folder, max_steps=STEPS, max_epochs=1)
    try:
        fit.fit(module, DataLoader(range(2 * STEPS)))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return [weight.detach().clone() for weight in module.model.parameters()]


@pytest.fixture(scope="module")
def expected() -> Outcomes:
    return launch_cases({name: partial(train_in_loop, "by hand", name, True) for name in BETWEEN_STEPS}, 2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("fits")
    return launch_cases({case: partial(train, *case, folder) for case in CASES}, 2, init=False, launch=on_ranks)


@pytest.mark.parametrize(("strategy", "name", "in_step"), CASES)
def test_a_habit_in_a_hook_is_trained_on_or_refused(
    strategy: str, name: str, in_step: bool, outcomes: Outcomes, expected: Outcomes
) -> None:
    if (name, strategy) not in LOST and not (strategy == "ddp" and name in OF_DDP):
        assert_trained(outcomes[strategy, name, in_step], expected[name], refusal(strategy, name, waits=True))


def clamp_within_step(folder: Path, policy: str) -> Any:
    module = Module("clamp weights", in_step=True)
    fit = trainer(ParameterServerStrategy(policy=policy), 2, folder, max_steps=STEPS, max_epochs=1)
    return raised(lambda: fit.fit(module, DataLoader(range(2 * STEPS))))


@pytest.mark.parametrize("policy", ["async", "k_sync", "ssp"])
def test_servers_of_which_ranks_have_weights_of_their_own_age_refuse_what_is_written(
    policy: str, tmp_path: Path
) -> None:
    for error in on_ranks(partial(clamp_within_step, tmp_path, policy), 2, init=False):
        assert f"was written to, and with policy='{policy}' the weights are the servers'" in error[1]
