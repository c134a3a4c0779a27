"""What strategies refuse in a Trainer, before a training and on all ranks: each names what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from tests.nightly.frameworks.test_lightning_events import Fetching, TwoOptimizers
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.lightning_models import (
    Classifier,
    batches,
    dataset,
    make_strategy,
    scaling,
    train_loader,
    trainer,
    val_loader,
)

EA_PIPE, SERVERS = {"name": "ea_pipe"}, {"name": "parameter_server"}
QUEUE = {**SERVERS, "partition": "work_queue"}
INJECTION, UNDIVIDED = {"injection": (0.5, 0.5)}, {"use_distributed_sampler": False}
HOUR = timedelta(hours=1)


class Fused(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4, sparse=True)


class TwoSequences(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(6, 6))


class NoSequence(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(6, 2)  # type: ignore[assignment]


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(dataset())


def one_sample() -> DataLoader:
    data = Subset(dataset(), [0])
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False))


def other_lengths() -> DataLoader:
    return DataLoader(Subset(dataset(), range(8 + 8 * int(os.environ["RANK"]))), batch_size=4)


def ema_on_rank_0() -> pl.Callback:
    return EMAWeightAveraging() if os.environ["RANK"] == "0" else pl.Callback()


swa = partial(StochasticWeightAveraging, 0.05)
of_time = partial(ModelCheckpoint, train_time_interval=HOUR)
Normalized = partial(Classifier, batch_norm=True)


@dataclass(frozen=True)
class Refused:
    """A training; ``make``, ``loader`` and ``callback`` make one."""

    strategy: dict[str, Any]
    make: Callable[[], Classifier] = Classifier
    loader: Callable[[], DataLoader] = train_loader
    callback: Callable[[], pl.Callback] = pl.Callback
    arguments: dict[str, Any] = field(default_factory=dict)


#: By what is named; " ... " stands between words.
REFUSED = {
    "fused=False": Refused({}, Fused, arguments={"plugins": [scaling()]}),
    "embedding": Refused({}, Sparse),
    "val_check_interval=...) is a time, of 1 s": Refused({}, arguments={"val_check_interval": {"seconds": 1}}),
    "injection=(0.5, 0.5) ... dataloader_iter": Refused(INJECTION, Fetching),
    "injection= ... batch_size=None": Refused(INJECTION, loader=partial(DataLoader, batches(), batch_size=None)),
    "1 samples ... 2 ranks": Refused({}, loader=one_sample),
    "rank 0 has 2, rank 1 has 4 ... limit_train_batches": Refused({}, loader=other_lengths, arguments=UNDIVIDED),
    # Averages of weights.
    "rank 0 has EMAWeightAveraging, rank 1 has none": Refused({"name": "dear"}, callback=ema_on_rank_0),
    "StochasticWeightAveraging ... 'pipe_sgd'": Refused({"name": "pipe_sgd"}, Normalized, callback=swa),
    "StochasticWeightAveraging ... 'parameter_server'": Refused(SERVERS, Normalized, callback=swa),
    # Pipelines.
    "module=": Refused(EA_PIPE, TwoSequences),
    "has none": Refused(EA_PIPE, NoSequence),
    "automatic_optimization": Refused(EA_PIPE, TwoOptimizers),
    "StochasticWeightAveraging averages": Refused(EA_PIPE, callback=swa),
    "16-mixed": Refused(EA_PIPE, arguments={"plugins": [scaling()]}),
    "loader's iterator": Refused(EA_PIPE, Fetching),
    "split": Refused({**EA_PIPE, "split": (1, 2)}),
    "monitor=..., train_time_interval": Refused(EA_PIPE, callback=partial(of_time, monitor="loss")),
    # What ranks would wait for that do not wait for each other.
    "k=3": Refused({**SERVERS, "policy": "k_sync", "k": 3}),
    "servers=3": Refused({**SERVERS, "servers": 3}),
    "Trainer(max_time=...) has": Refused(SERVERS, arguments={"max_time": HOUR}),
    "train_time_interval=...) has": Refused(SERVERS, callback=of_time),
    "search for a learning rate": Refused(SERVERS, callback=LearningRateFinder),
    # What they would count differently, with a work queue.
    "Trainer(min_steps=...) counts the steps of a rank": Refused(QUEUE, arguments={"min_steps": 5}),
    "Trainer(max_time=...) counts": Refused(QUEUE, arguments={"max_time": HOUR}),
    "Trainer(val_check_interval=...) counts": Refused(QUEUE, arguments={"val_check_interval": 5}),
    "Trainer(overfit_batches=...) counts": Refused(QUEUE, arguments={"overfit_batches": 2}),
    "Trainer(limit_train_batches=...) counts": Refused(QUEUE, arguments={"limit_train_batches": 3}),
    "(every_n_train_steps=...) counts": Refused(QUEUE, callback=partial(ModelCheckpoint, every_n_train_steps=3)),
    "this loader has Numbers": Refused(QUEUE, loader=partial(DataLoader, Numbers(), 4)),
    "1 batches to hand out, too few for 2 ranks": Refused(QUEUE, loader=partial(train_loader, 64)),
}


def refuse(folder: Path, words: str) -> tuple[str, str] | None:
    case = REFUSED[words]
    callback = case.callback()
    run = trainer(
        make_strategy(case.strategy), 2, folder, callbacks=[callback],
        enable_checkpointing=isinstance(callback, ModelCheckpoint), **case.arguments,
    )  # fmt: skip
    return raised(lambda: run.fit(case.make(), case.loader(), val_loader()))


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return launch_cases({words: partial(refuse, folder, words) for words in REFUSED}, 2, init=False)


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_by_name(words: str, outcomes: Outcomes) -> None:
    for outcome in outcomes[words]:
        assert_raised(outcome, "ValueError", *words.split(" ... "))
