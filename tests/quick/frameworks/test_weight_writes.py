"""What user code writes to weights under a Trainer is trained on as with DDP, or refused by name."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.lightning_models import Classifier, fit
from tests.support.method_runs import SYNCHRONOUS, synchronous_strategy

METHODS = [case for case in SYNCHRONOUS if case not in ("dear, no overlap", "selsync, weights")]


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.2, 0.2)


class InHook(Classifier):
    def on_train_batch_end(self, *_: Any) -> None:
        clamp(self)


class AfterStep(Classifier):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        clamp(self)


class InStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        clamp(self)
        return super().training_step(batch, batch_idx)


def in_callback() -> pl.Callback:
    return LambdaCallback(on_train_batch_end=lambda trainer, module, *_: clamp(module))


#: The module, and callbacks.
PLACES: dict[str, tuple[type[Classifier], Any]] = {
    "hook": (InHook, None),
    "callback": (Classifier, in_callback),
    "after the step": (AfterStep, None),
}


def train(place: str, method: str | None, folder: Path) -> Tensor:
    make, callback = PLACES[place]
    strategy = "ddp" if method is None else synchronous_strategy(method)
    callbacks = [] if callback is None else [callback()]
    return fit(folder, strategy, make=make, callbacks=callbacks)["parameters"]


def refuse(folder: Path, make: type[Classifier], **strategy: Any) -> tuple[str, str] | None:
    return raised(lambda: fit(folder, {"timeout_s": 20, **strategy}, make=make))


#: By what each says, what is refused.
REFUSED: dict[str, dict[str, Any]] = {
    "was written to while its update": {"make": InStep, **synchronous_strategy("dear")},
    "Call synchronize() before": {"make": InStep, **synchronous_strategy("dear, sharded")},
    "the weights are the servers'": {"make": InHook, "name": "parameter_server", "policy": "async"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("fits")
    cases: dict[Any, Any] = {pair: partial(train, *pair, folder) for pair in product(PLACES, [None, *METHODS])}
    cases |= {words: partial(refuse, folder, **case) for words, case in REFUSED.items()}
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_hooks_write_are_trained_on(place: str, method: str, outcomes: Outcomes) -> None:
    [expected, _] = outcomes[place, None]
    for found in outcomes[place, method]:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("words", REFUSED)
def test_a_write_that_would_be_lost_is_refused(words: str, outcomes: Outcomes) -> None:
    """It names the parameter, and what to do."""
    for error in outcomes[words]:
        assert_raised(error, "RuntimeError", "model.", words)
