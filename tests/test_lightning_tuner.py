"""Lightning's learning rate finder, which puts other callbacks in place of the Trainer's while it tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.harness import launch
from tests.lightning_models import Classifier, make_strategy, train_loader, trainer


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


def fit(directory: Path, method: str, how: str, lr: float) -> tuple[float, Tensor, float]:
    search: dict[str, Any] = {"min_lr": 1e-4, "early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=20, **search)
    model = Tuned(lr)
    strategy = make_strategy({"name": method, **STRATEGIES[method]})
    run = trainer(strategy, 2, directory, max_epochs=3, callbacks=[finder] if how == "callback" else [])
    if how == "tuner":
        Tuner(run).lr_find(model, train_loader(), num_training=20, **search)
    run.fit(model, train_loader())
    return model.lr, model.weights(), float(run.callback_metrics[f"{method}/lssr"])


@pytest.mark.parametrize(("method", "how"), [("selsync", "tuner"), ("selsync", "callback"), ("local_sgd", "tuner")])
def test_learning_rate_finder(method: str, how: str, tmp_path: Path) -> None:
    """The search leaves no trace: what follows is a run with the learning rate that was found."""
    outcomes = launch(fit, 2, tmp_path, method, how, 0.5, init=False)
    found = outcomes[0][0]
    assert found != 0.5
    for (lr, weights, lssr), expected in zip(
        outcomes, launch(fit, 2, tmp_path, method, "plain", found, init=False), strict=True
    ):
        assert lr == found
        assert torch.equal(weights, outcomes[0][1])
        assert torch.equal(weights, expected[1])
        assert lssr == expected[2]
