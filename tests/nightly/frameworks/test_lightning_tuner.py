"""Lightning's learning rate finder, which puts other callbacks in place of the Trainer's while it tries."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.support.case_table import launch_cases
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer


class Tuned(Classifier):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


STRATEGIES: dict[str, dict[str, Any]] = {
    "selsync": {"delta": 0.1},
    "local_sgd": {"period": 5, "outer_optimizer": "nesterov"},
}
#: The method, and what finds its learning rate.
CASES = [("selsync", "tuner"), ("selsync", "callback"), ("local_sgd", "tuner")]


def fit(directory: Path, method: str, how: str, lr: float) -> tuple[float, Tensor, float]:
    search: dict[str, Any] = {"min_lr": 1e-4, "early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=14, **search)
    model = Tuned(lr)
    strategy = make_strategy({"name": method, **STRATEGIES[method]})
    run = trainer(strategy, 2, directory, max_epochs=2, callbacks=[finder] if how == "callback" else [])
    if how == "tuner":
        Tuner(run).lr_find(model, train_loader(), num_training=14, **search)
    run.fit(model, train_loader())
    return model.lr, model.weights(), float(run.callback_metrics[f"{method}/lssr"])


def fit_found(directory: Path, method: str, how: str) -> list[tuple[float, Tensor, float]]:
    """Returns what the finder has led to, and a run that begins with what it has found."""
    with mock.patch.dict(os.environ):  # a Trainer removes what a launcher has set
        found = fit(directory, method, how, 0.5)
    return [found, fit(directory, method, "plain", found[0])]


def test_learning_rate_finder(tmp_path: Path) -> None:
    """The search leaves no trace: what follows is a run with the learning rate that was found."""
    cases = {case: partial(fit_found, tmp_path, *case) for case in CASES}
    outcomes = launch_cases(cases, 2, init=False)
    for case in CASES:
        for found, expected in outcomes[case]:
            assert found[0] == expected[0] == outcomes[case][0][0][0] != 0.5
            assert torch.equal(found[1], outcomes[case][0][0][1])
            assert torch.equal(found[1], expected[1])
            assert found[2] == expected[2]
