"""Habits between two steps in a Trainer, with Accelerate and in Fabric: trained on as in a plain loop, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

import lightning_pipesync.fabric  # noqa: F401  # registers the strategies
from tests.support.accelerate_runs import accelerator_of, end
from tests.support.case_table import Outcomes, launch_cases
from tests.support.habit_runs import LOST, OF_DDP, OF_GRADIENTS, SERVERS, assert_trained, refusal, run_steps
from tests.support.habit_runs import train as train_in_plain_loop
from tests.support.habits import HABITS, STEPS, Loop, layers
from tests.support.harness import assert_raised, raised
from tests.support.lightning_models import Classifier, make_strategy, trainer
from tests.support.lightning_models import fit as fit_model
from tests.support.method_runs import SYNCHRONOUS, synchronous_strategy

#: Habits that a Trainer's user can have, too.
BETWEEN_STEPS = [name for name, habit in HABITS.items() if habit.instead is None and habit.after_backward is None]


class FrameworkLoop(Loop):
    """A loop of an Accelerator or a Fabric, which prepares its model and optimizer by a call of ``prepare``."""

    def __init__(self, framework: Any, prepare: Callable[..., Any]) -> None:
        model = layers()
        prepared, optimizer = prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        super().__init__(model, optimizer)
        self.framework, self.forward = framework, prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.framework.backward(loss, **kwargs)


class AccelerateLoop(FrameworkLoop):
    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        accelerator = accelerator_of(method, **settings)
        super().__init__(accelerator, accelerator.prepare)

    def synchronize(self) -> None:
        self.framework.synchronize()

    def flush(self) -> None:
        self.framework.consolidate()

    def end(self) -> None:
        end(self.framework)


class FabricLoop(FrameworkLoop):
    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        strategy = STRATEGY_REGISTRY[method]["strategy"](**settings)
        fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
        fabric.launch()
        super().__init__(fabric, fabric.setup)

    def synchronize(self) -> None:
        self.framework.strategy.method_of().synchronize()

    def flush(self) -> None:
        self.framework.strategy.method_of().flush()

    def end(self) -> None:
        self.framework.strategy.teardown()


class TrainerLoop(Loop):
    def __init__(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        super().__init__(module.model, optimizer)
        self._trainer = module.trainer

    def optimizer_state(self) -> dict[str, Any]:
        return self._trainer.strategy.optimizer_state(self.optimizer)


#: Where a habit is in a Trainer: in ``training_step``, so within the optimizer's step, after that, or after the batch.
PLACES = ("in the step", "after the step", "after the batch")


class Module(pl.LightningModule):
    def __init__(self, name: str, place: str) -> None:
        super().__init__()
        self.model, self.habit, self.place = layers(), HABITS[name].after_step, place

    def on_train_start(self) -> None:
        self.loop = TrainerLoop(self, self.trainer.optimizers[0])

    def act(self, place: str) -> None:
        self.loop.number += place == "after the step"
        if self.habit is not None and place == self.place and 0 < self.loop.number < STEPS:
            self.habit(self.loop)
            self.trainer.strategy.optimizers = [self.loop.optimizer]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.act("in the step")
        return self.loop.loss()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.act("after the step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.act("after the batch")

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_in_loop(make: Callable[..., AccelerateLoop | FabricLoop], method: str, name: str) -> list[Tensor] | str:
    loop = make(*SYNCHRONOUS[method])
    try:
        run_steps(loop, name, waits=True)
        loop.flush()
        return [weight.detach().clone() for weight in loop.weights]
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        loop.end()


def train_in_trainer(place: str, folder: Path, method: str, name: str) -> list[Tensor] | str:
    module = Module(name, place)
    strategy = "ddp_find_unused_parameters_true" if method == "ddp" else synchronous_strategy(method)
    error = raised(lambda: fit(module, strategy, folder))
    return error[1] if error else [weight.detach().clone() for weight in module.model.parameters()]


def fit(module: Module, strategy: Any, folder: Path) -> None:
    run = trainer(make_strategy(strategy), 2, folder, max_steps=STEPS, max_epochs=1)
    run.fit(module, DataLoader(range(2 * STEPS)))


METHODS = ["ddp", *SYNCHRONOUS]
FRAMEWORKS = ("a Trainer", "accelerate", "fabric")


def places(method: int, name: int) -> list[str]:
    """Returns where a habit is: frameworks in turns, with servers both places of a Trainer."""
    turn, habit = (method + name) % len(FRAMEWORKS), list(HABITS)[name]
    if METHODS[method] != "ddp" and (turn or habit not in BETWEEN_STEPS):
        return [FRAMEWORKS[turn or 1 + (method + name) % 2]]
    if habit not in BETWEEN_STEPS:
        return []
    if habit == "replace the optimizer":
        return ["after the batch"]
    both = ["after the batch", "in the step"]
    found = both if METHODS[method] in SERVERS else [both[(method + name) % 2]]
    return [*found, "after the step"] if habit == "clamp weights" else found


#: Where the habit is, the method, and the habit.
CASES = [
    (place, method, name) for i, method in enumerate(METHODS) for j, name in enumerate(HABITS) for place in places(i, j)
]


@pytest.fixture(scope="module")
def expected() -> Outcomes:
    cases = {name: partial(train_in_plain_loop, "by hand", name, name not in OF_GRADIENTS) for name in HABITS}
    return launch_cases(cases, 2)


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    train = {
        "accelerate": partial(train_in_loop, AccelerateLoop),
        "fabric": partial(train_in_loop, FabricLoop),
        **{place: partial(train_in_trainer, place, folder) for place in PLACES},
    }
    return launch_cases({case: partial(train[case[0]], *case[1:]) for case in CASES}, 2, init=False)


@pytest.mark.parametrize(("place", "method", "name"), CASES)
def test_a_habit_is_trained_on_or_refused(
    place: str, method: str, name: str, outcomes: Outcomes, expected: Outcomes
) -> None:
    if (name, method) not in LOST and not (method == "ddp" and name in OF_DDP):
        assert_trained(outcomes[place, method, name], expected[name], refusal(method, name, waits=True))


class InStep(Classifier):
    """Writes to its weights before the forward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


#: By strategy, what is said of a write that would be lost.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (synchronous_strategy("dear"), "was written to while its update"),
    (synchronous_strategy("dear, sharded"), "Call synchronize() before"),
    *(
        ({"name": "parameter_server", "policy": policy}, f"with policy='{policy}' the weights are the servers'")
        for policy in ("async", "k_sync", "ssp")
    ),
]


def test_a_write_that_would_be_lost_is_refused(folder: Path) -> None:
    """It names the parameter, and what to do."""
    fits = {says: partial(fit_model, folder, {"timeout_s": 20, **strategy}, make=InStep) for strategy, says in REFUSED}
    outcomes = launch_cases({says: partial(raised, run) for says, run in fits.items()}, 2, init=False)
    for says in fits:
        for error in outcomes[says]:
            assert_raised(error, "RuntimeError", "model.", says)
