"""Running averages of the weights in a Trainer (EMA, SWA): the same on all ranks when they are read."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.nightly.frameworks.test_lightning_events import Watch
from tests.references.selsync import mean
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import LOCAL, Classifier, make_strategy, train_loader, trainer, val_loader

Settings = dict[str, Any]
DECAY = 0.8
#: Steps after which a checkpoint is saved; or it is at the end of each epoch.
SAVED = 5
OF_EPOCHS = {"every_n_epochs": 1, "save_on_train_epoch_end": True}


class Network(Classifier):
    """Each rank begins with weights of its own, as without a common seed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        torch.manual_seed(int(os.environ["RANK"]))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += torch.randn_like(parameter) / 10


def average(
    folder: Path,
    settings: Settings | str,
    callback: Any,
    epochs: int = 2,
    saves: dict[str, Any] | None = None,
    resume: Path | None = None,
    **module: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Trains with a callback.

    Returns:
        the weights, with buffers, at each validation and at the end, where the parameters alone follow; and the weights
        after each step.
    """
    model, watch = Network(**module), Watch()
    savers = [] if saves is None else [ModelCheckpoint(folder, "{step}", save_top_k=-1, **saves)]
    how: dict[str, Any] = {"callbacks": [callback(), watch, *savers], "enable_checkpointing": bool(savers)}
    run = trainer(make_strategy(settings), 2, folder, max_epochs=epochs, **how)
    run.fit(model, train_loader(), val_loader(), ckpt_path=resume)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    return [*model.validated_with, model.weights(), parameters], watch.steps


def found(*args: Any, **kwargs: Any) -> list[Tensor]:
    return average(*args, **kwargs)[0]


def ema() -> pl.Callback:
    return EMAWeightAveraging(decay=DECAY)


def late_ema() -> pl.Callback:
    return EMAWeightAveraging(decay=DECAY, update_starting_at_step=9)


class Swa(StochasticWeightAveraging):
    """Checks the final weights of a network without BatchNorm against the average."""

    def __init__(self) -> None:
        super().__init__(0.05, swa_epoch_start=1, annealing_epochs=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        mean = nn.utils.parameters_to_vector(self._average_model.parameters())
        if not list(pl_module.buffers()):
            assert torch.equal(nn.utils.parameters_to_vector(pl_module.parameters()), mean)


#: With BatchNorm, but for SWA; those that are DDP are in the table of events.
RUNNING: dict[str, tuple[Settings, Any]] = {
    "local_sgd": ({"name": "local_sgd", "period": 3, "warmup_steps": 5}, ema),
    "local_sgd, pairs": ({"name": "local_sgd", "period": 2, "neighbors": "random_pairs"}, ema),
    "async": ({"name": "parameter_server"}, ema),
    "downpour": ({"name": "parameter_server", "policy": "downpour"}, ema),
    "easgd": ({"name": "parameter_server", "policy": "easgd", "period": 2}, ema),
    "diloco": ({"name": "parameter_server", "policy": "diloco", "period": 2, "k": 1}, ema),
    "late, dear": ({"name": "dear"}, late_ema),
    "late, selsync": (LOCAL, late_ema),
    "late, async": ({"name": "parameter_server"}, late_ema),
    "SWA, pipe_sgd": ({"name": "pipe_sgd"}, Swa),
    "SWA, async": ({"name": "parameter_server"}, Swa),
    "SWA, local_sgd": ({"name": "local_sgd", "period": 3}, Swa),
    "SWA, selsync": ({}, Swa),
}
#: Whose replicas' averages are averaged.
REPLICAS: dict[str, Settings] = {
    "selsync": LOCAL,
    "local_sgd": {"name": "local_sgd", "period": 5},
    "local_sgd, overlapped": {"name": "local_sgd", "period": 4, "overlap_steps": 3},
}
#: By what is special of them: the first steps make no update, gradients are those of other weights, the last ones come
#: after the last step, they are sent within the backward pass.
PIPELINED: dict[str, Settings] = {
    "prediction": {},
    "late": {"staleness": 2, "delay_compensation": "none"},
    "drained": {"staleness": 2, "drain": True},
    "segments": {"pipeline_level": 2, "compression": "int8", "warmup_steps": 3},
}


def average_of(steps: list[Tensor]) -> list[Tensor]:
    """Returns the running average after each step, of weights after it."""
    running, averages = AveragedModel(nn.ParameterList([steps[0]]), avg_fn=get_ema_avg_fn(DECAY)), []
    for weights in steps:
        running.update_parameters(nn.ParameterList([weights]))
        averages.append(next(running.parameters()).detach().clone())
    return averages


def averaged_pipeline(folder: Path, settings: Settings) -> dict[str, Any]:
    given = {"name": "pipe_sgd", **settings}
    weights, steps = average(folder, given, ema, saves={"every_n_train_steps": SAVED})
    resumed = found(folder / "again", given, ema, resume=folder / f"step={SAVED}.ckpt")
    saved = Network()
    saved.load_state_dict(torch.load(folder / f"step={SAVED}.ckpt", weights_only=True)["state_dict"])
    averages = average_of(steps)
    half, last = averages[len(steps) // 2 - 1], averages[-1]
    return {
        "found": [*weights, saved.weights(), resumed[-1]],
        "expected": [half, last, last, last, averages[SAVED - 1], last],
    }


SERVERS = {"name": "parameter_server", "policy": "sync"}
SYNCHRONOUS = {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"}
#: Settings with which it is DDP's; and whether the network has BatchNorm, where the average is written while training.
SWA_OF_DDP: dict[str, tuple[Settings, bool]] = {
    "dear": ({"name": "dear"}, True),
    "pipe_sgd": ({"name": "pipe_sgd", "staleness": 0}, True),
    "local_sgd": ({"name": "local_sgd", "warmup_steps": 1000}, True),
    "selsync": (SYNCHRONOUS, True),
    "selsync, plain": (SYNCHRONOUS, False),
    "servers": (SERVERS, True),
    "servers, plain": (SERVERS, False),
}
SWA_RESUMED = {name: {"name": name} for name in ("selsync", "local_sgd")}


def resumed_swa(folder: Path, settings: Settings) -> list[Tensor]:
    """The final weights of four epochs, and of the last two resumed from the second."""
    whole = found(folder, settings, Swa, epochs=4, saves=OF_EPOCHS)
    return [whole[-1], found(folder / "on", settings, Swa, epochs=4, resume=folder / "step=16.ckpt")[-1]]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        ("running", name): partial(found, folder, *case, epochs=3, batch_norm=case[1] is not Swa)
        for name, case in RUNNING.items()
    }
    cases |= {
        ("replicas", name): partial(average, folder, given, ema, epochs=4, batch_norm=True)
        for name, given in REPLICAS.items()
    }
    for name, given in PIPELINED.items():
        cases["pipelined", name] = partial(averaged_pipeline, folder / name, given)
    swa = partial(found, folder, epochs=3)
    cases |= {("swa", "ddp", batch_norm): partial(swa, "ddp", Swa, batch_norm=batch_norm) for batch_norm in (0, 1)}
    for name, (given, batch_norm) in SWA_OF_DDP.items():
        cases["swa", name, batch_norm] = partial(swa, given, Swa, batch_norm=batch_norm)
    cases |= {("resumed", name): partial(resumed_swa, folder / name, given) for name, given in SWA_RESUMED.items()}
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("name", RUNNING)
def test_running_averages_are_the_same_on_all_ranks(name: str, trained: Outcomes) -> None:
    first, second = trained["running", name]
    assert len(first) == 3 + 2
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", REPLICAS)
def test_an_ema_is_that_of_the_average(name: str, trained: Outcomes) -> None:
    """The EMA of each rank's replica, averaged, is the EMA of the averaged replicas: checked on every batch end."""
    outcomes = trained["replicas", name]
    averages = [mean(list(step)).double() for step in zip(*(steps for _, steps in outcomes), strict=True)]
    expected = average_of(averages)[-1]
    for weights, _ in outcomes:
        torch.testing.assert_close(weights[-2].double(), expected, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, weights, outcomes[0][0]))


@pytest.mark.parametrize("name", PIPELINED)
def test_it_is_the_average_of_the_weights_after_each_step(name: str, trained: Outcomes) -> None:
    """Bit for bit: validations see it, the end has it, without drained gradients, and so has a resumed run."""
    for outcome in trained["pipelined", name]:
        assert all(torch.equal(*both) for both in zip(outcome["found"], outcome["expected"], strict=True))


@pytest.mark.parametrize("name", SWA_OF_DDP)
def test_stochastic_weight_averaging_is_that_of_ddp(name: str, trained: Outcomes) -> None:
    batch_norm = SWA_OF_DDP[name][1]
    [expected, _] = trained["swa", "ddp", batch_norm]
    for actual in trained["swa", name, batch_norm]:
        torch.testing.assert_close(actual[-1], expected[-1])
        assert "selsync" not in name or torch.equal(actual[-1], expected[-1])


@pytest.mark.parametrize("name", SWA_RESUMED)
def test_a_stochastic_average_that_is_resumed_is_the_same_on_all_ranks(name: str, trained: Outcomes) -> None:
    """And that of the uninterrupted run: at the beginning of an epoch SWA reads the consolidated weights."""
    for whole, resumed in trained["resumed", name]:
        assert torch.equal(whole, trained["resumed", name][0][0])
        assert torch.equal(resumed, whole)
