"""Running averages of the weights in a Trainer (EMA, SWA), with BatchNorm: the same on all ranks when they are read."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer, val_loader

#: Methods, and settings, with which the weights are the same as DDP's.
EXACT: dict[str, dict[str, Any]] = {
    "dear": {},
    "pipe_sgd": {"staleness": 0},
    "local_sgd": {"warmup_steps": 1000},
    "parameter_server": {"policy": "sync"},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *EXACT.items(),
    ("pipe_sgd", {}),
    ("local_sgd", {"period": 3, "warmup_steps": 5}),
    ("local_sgd", {"period": 2, "neighbors": "random_pairs"}),
    ("selsync", {"delta": 1e9}),
    ("parameter_server", {}),
    ("parameter_server", {"policy": "downpour"}),
    ("parameter_server", {"policy": "easgd", "period": 2}),
    ("parameter_server", {"policy": "diloco", "period": 2, "k": 1}),
]
#: A method of each engine.
LATE: list[tuple[str, dict[str, Any]]] = [("dear", {}), ("selsync", {"delta": 1e9}), ("parameter_server", {})]
#: What a Trainer's training has at each validation, and, last, after it: parameters and buffers.
Found = list[tuple[Tensor, Tensor]]


class Network(Classifier):
    """Each rank begins with weights of its own, as without a common seed."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__(batch_norm=batch_norm)
        torch.manual_seed(int(os.environ["RANK"]))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += torch.randn_like(parameter) / 10

    def parameters_and_buffers(self) -> tuple[Tensor, Tensor]:
        buffers = torch.cat([torch.zeros(0), *(buffer.float().flatten() for buffer in self.buffers())])
        return nn.utils.parameters_to_vector(self.parameters()).clone(), buffers


class Watch(pl.Callback):
    """What other callbacks, and the user, find while validating."""

    def __init__(self) -> None:
        self.found: Found = []

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Network, *args: Any) -> None:
        self.found.append(pl_module.parameters_and_buffers())


def average(
    directory: Path, strategy: str, settings: dict[str, Any], callback: Any, epochs: int = 2, batch_norm: bool = True
) -> Found:
    model, watch = Network(batch_norm), Watch()
    chosen = strategy if strategy == "ddp" else make_strategy({"name": strategy, **settings})
    callbacks = [callback(), watch]
    trainer(chosen, 2, directory, callbacks=callbacks, max_epochs=epochs).fit(model, train_loader(), val_loader())
    return [*watch.found, model.parameters_and_buffers()]


def average_on_rank_0(run: Any) -> Found:
    return run("dear", {}, ema if os.environ["RANK"] == "0" else pl.Callback)


def ema() -> WeightAveraging:
    return EMAWeightAveraging(decay=0.8)


def late_ema() -> WeightAveraging:
    return EMAWeightAveraging(decay=0.8, update_starting_at_step=9)


AVERAGED = [*((*case, ema) for case in CASES), *((*case, late_ema) for case in LATE)]


@pytest.fixture(scope="module")
def running(folder: Path) -> Outcomes:
    """By strategy, settings and callback."""
    run = partial(average, folder)
    cases: dict[Any, Any] = {
        (strategy, str(settings), callback): partial(run, strategy, settings, callback)
        for strategy, settings, callback in [("ddp", {}, ema), *AVERAGED]
    }
    return launch_cases({**cases, "one rank": partial(raised, partial(average_on_rank_0, run))}, 2, init=False)


@pytest.mark.parametrize(("strategy", "settings", "callback"), AVERAGED)
def test_running_averages_are_the_same_on_all_ranks(
    strategy: str, settings: dict[str, Any], callback: Any, running: Outcomes
) -> None:
    first, second = running[strategy, str(settings), callback]
    assert len(first) > 3
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        for kind, mine, theirs in zip(("parameters", "buffers"), one, other, strict=True):
            assert torch.equal(mine, theirs), (index, kind)


@pytest.mark.parametrize("strategy", EXACT)
def test_exact_methods_have_the_running_average_of_ddp(strategy: str, running: Outcomes) -> None:
    """The buffers, too: those of rank 0; the average of the ranks' with local SGD, which DDP does not have."""
    [expected, _] = running["ddp", "{}", ema]
    [actual, _] = running[strategy, str(EXACT[strategy]), ema]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one[0], other[0])
        if strategy != "local_sgd":
            torch.testing.assert_close(one[1], other[1])


class Swa(StochasticWeightAveraging):
    def __init__(self) -> None:
        super().__init__(0.05, swa_epoch_start=1, annealing_epochs=1)


#: Methods that keep what is written to the weights while they train.
KEEPING = {
    "dear": {},
    "pipe_sgd": {"staleness": 0},
    "local_sgd": {"warmup_steps": 1000},
    "selsync": {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"},
}
#: And whether the network has BatchNorm.
SWA_CASES: list[tuple[str, dict[str, Any], bool]] = [
    *((*one, True) for one in KEEPING.items()),
    ("selsync", KEEPING["selsync"], False),
    ("parameter_server", {"policy": "sync"}, False),
]
#: Without BatchNorm.
INEXACT = [("pipe_sgd", {}), ("parameter_server", {}), ("local_sgd", {"period": 3}), ("selsync", {})]
#: With it.
REFUSED = [("pipe_sgd", {}), ("parameter_server", {}), ("parameter_server", {"policy": "sync"})]


class KeepingSwa(Swa):
    """Has the final weights checked against the average."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        mean = nn.utils.parameters_to_vector(self._average_model.parameters())
        assert torch.equal(nn.utils.parameters_to_vector(pl_module.parameters()), mean)


def resumed_swa(folder: Path, strategy: str) -> list[Tensor]:
    """The final weights of four epochs, and of the last two resumed from the end of the second."""
    found = []
    for epochs, path in ((4, None), (2, None), (4, "last.ckpt")):
        model, saver = (
            Network(batch_norm=False),
            ModelCheckpoint(folder / f"{epochs}", save_last=True, every_n_epochs=1),
        )
        chosen = make_strategy({"name": strategy})
        run = trainer(chosen, 2, folder, callbacks=[Swa(), saver], enable_checkpointing=True, max_epochs=epochs)
        run.fit(model, train_loader(), ckpt_path=None if path is None else folder / "2" / path)
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return [found[0], found[2]]


def test_a_stochastic_average_that_is_resumed_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """And that of the uninterrupted run: at the beginning of an epoch SWA reads the consolidated weights."""
    cases = {name: partial(resumed_swa, tmp_path / name, name) for name in ("selsync", "local_sgd")}
    outcomes = launch_cases(cases, 2, init=False)
    for name in cases:
        (whole, resumed), (other, also) = outcomes[name]
        assert torch.equal(whole, other), name
        assert torch.equal(resumed, also), name
        assert torch.equal(whole, resumed), name


@pytest.fixture(scope="module")
def stochastic(folder: Path) -> Outcomes:
    run = partial(average, folder, epochs=3)
    cases: dict[Any, Any] = {
        (strategy, batch_norm): partial(run, strategy, settings, Swa, batch_norm=batch_norm)
        for strategy, settings, batch_norm in [("ddp", {}, True), ("ddp", {}, False), *SWA_CASES]
    }
    for strategy, settings in INEXACT:
        cases["inexact", strategy] = partial(run, strategy, settings, KeepingSwa, batch_norm=False)
    for strategy, settings in REFUSED:
        cases["refused", strategy, str(settings)] = partial(raised, partial(run, strategy, settings, Swa))
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize(("strategy", "batch_norm"), [(strategy, batch_norm) for strategy, _, batch_norm in SWA_CASES])
def test_stochastic_weight_averaging_is_that_of_ddp(strategy: str, batch_norm: bool, stochastic: Outcomes) -> None:
    [expected, _] = stochastic["ddp", batch_norm]
    for actual in stochastic[strategy, batch_norm]:
        torch.testing.assert_close(actual[-1][0], expected[-1][0])
        assert strategy != "selsync" or torch.equal(actual[-1][0], expected[-1][0])


@pytest.mark.parametrize(("strategy", "settings"), INEXACT)
def test_the_final_weights_are_the_stochastic_average(
    strategy: str, settings: dict[str, Any], stochastic: Outcomes
) -> None:
    first, second = stochastic["inexact", strategy]
    assert torch.equal(first[-1][0], second[-1][0])
    assert not torch.equal(first[-1][0], stochastic["ddp", False][0][-1][0])


@pytest.mark.parametrize(("strategy", "settings"), REFUSED)
def test_an_average_that_would_be_overwritten_is_refused(
    strategy: str, settings: dict[str, Any], stochastic: Outcomes
) -> None:
    for outcome in stochastic["refused", strategy, str(settings)]:
        assert_refused({"StochasticWeightAveraging": outcome, strategy: outcome})


def test_a_running_average_on_one_rank_is_refused(running: Outcomes) -> None:
    for outcome in running["one rank"]:
        assert_refused({"rank 0 has EMAWeightAveraging, rank 1 has none": outcome})
