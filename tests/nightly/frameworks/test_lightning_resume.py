"""Resuming within an epoch, with loaders of every kind: the next unseen batch, and no other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_pipesync import SelDPSampler, SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import on_ranks
from tests.support.lightning_models import Classifier, batches, dataset, train_loader, trainer


class Recorder(Classifier):
    """It trains on batches of one loader, or of several; a loader that is used up gives None."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        several = batch if isinstance(batch[0], list) or batch[0] is None else [batch]
        self.seen.append([None if part is None else part[0].tolist() for part in several])
        parts = [part for part in several if part is not None]
        return sum(nn.functional.cross_entropy(self.model(x), y) for _, x, y in parts)


class Resumable(DataLoader):
    """Knows itself where it stopped, and goes on from there."""

    fetched = skipped = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.skipped = self.skipped, 0
        for i, batch in enumerate(super().__iter__()):
            self.fetched = i + 1
            if i >= skipped:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"fetched": self.fetched}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["fetched"]


def combined(mode: Any) -> CombinedLoader:
    """16, 8 and 2 batches an epoch; the last also leaves 3 of its 11 samples out each time."""
    few = Subset(dataset(), range(22))
    return CombinedLoader([train_loader(2), train_loader(4), DataLoader(few, 4, shuffle=True, drop_last=True)], mode)


def own_sampler() -> DataLoader:
    data = dataset()
    sampler = SelDPSampler(data, 2, int(os.environ["RANK"]), seed=3)
    return DataLoader(data, 4, sampler=sampler, num_workers=1)


LOADERS: dict[str, Callable[[], Any]] = {
    "max_size_cycle": partial(combined, "max_size_cycle"),
    "max_size": partial(combined, "max_size"),
    "min_size": partial(combined, "min_size"),
    "workers": partial(train_loader, 4, num_workers=1),
    "no batches": lambda: DataLoader(batches(), batch_size=None, shuffle=True),
    "own sampler": own_sampler,
    "resumable": lambda: Resumable(dataset(), 4, shuffle=True),
}


def run(
    directory: Path, kind: str, steps: tuple[int, ...], resumed: int | None, epochs: int
) -> tuple[list[Any], list[str], bool]:
    """Returns what was trained on, the warnings about it, and whether the filter of warnings is as before.

    Args:
        directory: where checkpoints are.
        kind: of the loaders.
        steps: after each of which a checkpoint is saved.
        resumed: the one of them from which the training continues; None: it begins.
        epochs: number of epochs.
    """
    model = Recorder()
    saving: list[pl.Callback] = [
        ModelCheckpoint(directory / f"{resumed} {step}", filename="{step}", save_top_k=-1, every_n_train_steps=step)
        for step in steps
    ]
    strategy = SelSyncStrategy(delta=0.1)
    fitting = trainer(strategy, 2, directory, callbacks=saving, enable_checkpointing=True, max_epochs=epochs)
    path = None if resumed is None else str(directory / f"None {resumed}" / f"step={resumed}.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        fitting.fit(model, LOADERS[kind](), ckpt_path=path)
        unchanged = warnings.filters == filters
    return model.seen, [str(warning.message) for warning in caught], unchanged


#: After how many steps each is saved.
STEPS = {
    "max_size_cycle": (13, 29),
    "max_size": (13,),
    "min_size": (5,),
    "workers": (8,),
    "no batches": (5,),
    "own sampler": (5,),
    "resumable": (13,),
}
#: Their worker processes are forked, so they train in new processes.
WITH_WORKERS = ("workers", "own sampler")


def cases_of(kind: str, folder: Path) -> dict[tuple[str, int | None], Callable[[], Any]]:
    """Returns what trains at once, and from each checkpoint."""
    epochs = {"min_size": 4, "resumable": 3}.get(kind, 2)
    return {(kind, step): partial(run, folder / kind, kind, STEPS[kind], step, epochs) for step in (None, *STEPS[kind])}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    kinds = [kind for kind in LOADERS if kind not in WITH_WORKERS]
    return launch_cases({case: fit for kind in kinds for case, fit in cases_of(kind, folder).items()}, 2, init=False)


def assert_resumed(whole: list[Any], resumed: list[Any], step: int) -> None:
    for (all_seen, _, _), (seen, messages, unchanged) in zip(whole, resumed, strict=True):
        assert seen
        assert seen == all_seen[step:]
        assert not any("not resumable" in message for message in messages)
        assert unchanged


@pytest.mark.parametrize(
    ("kind", "step"), [(kind, step) for kind in LOADERS if kind not in WITH_WORKERS for step in STEPS[kind]]
)
def test_a_resumed_run_sees_what_the_uninterrupted_one_saw(kind: str, step: int, trained: Outcomes) -> None:
    assert_resumed(trained[kind, None], trained[kind, step], step)


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_a_resumed_run_with_workers_sees_what_the_uninterrupted_one_saw(kind: str, tmp_path: Path) -> None:
    whole, resumed = (on_ranks(fit, 2, init=False) for fit in cases_of(kind, tmp_path).values())
    assert_resumed(whole, resumed, STEPS[kind][0])
