"""`Trainer(strategy="selsync")` on real processes: training, data order, what sees the average."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from lightning_pipesync import SelSyncStrategy
from lightning_pipesync.data import SelDPSampler
from tests.harness import launch
from tests.lightning_models import SAMPLES, Classifier, dataset, train_loader, trainer, val_loader
from tests.models import OPTIMIZERS
from tests.reference_selsync import mean, simulate

# Far above any change: after the first step every step stays local, and the replicas differ.
LOCAL = {"delta": 1e9}


def fit(
    directory: Path,
    strategy: dict[str, Any] | str,
    module: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Fits a Classifier in this rank and returns what it did."""
    model = Classifier(**(module or {}))
    chosen = SelSyncStrategy(**strategy) if isinstance(strategy, dict) else strategy
    run = trainer(chosen, int(os.environ["WORLD_SIZE"]), directory, **kwargs)
    run.fit(model, train_loader(**(loader or {})), val_loader())
    return {
        "weights": model.weights(),
        "validated_with": model.validated_with,
        "seen": model.seen,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "shown": sorted(run.progress_bar_metrics),
        "steps": run.global_step,
    }


def fit_on(world_size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return launch(partial(fit, *args, **kwargs), world_size, init=False)


def expected_average(
    seen: list[list[list[int]]],
    num_batches: int,
    batches_per_epoch: int,
    module: dict[str, Any],
    accumulate: int = 1,
    **kwargs: Any,
) -> Tensor:
    """The average of the replicas after so many batches, by the simulation, on the batches that the ranks saw."""
    data = dataset()
    steps: list[list[int]] = []
    for batch in range(num_batches):
        if batch % batches_per_epoch % accumulate == 0:
            steps.append([])
        steps[-1].append(batch)

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        for batch in steps[step]:
            indices = seen[rank][batch]
            _, x, y = data[indices]
            result = nn.functional.cross_entropy(model(x), y) / accumulate
            if batch != steps[step][-1]:
                result.backward()
        return result

    torch.manual_seed(0)
    model = Classifier(**module)
    make = OPTIMIZERS[model.optimizer_name]
    replicas, _, _ = simulate(model.model, make, loss, world_size=len(seen), num_steps=len(steps), **kwargs)
    flat = [torch.cat([v.flatten() for v in r.state_dict().values() if v.is_floating_point()]) for r in replicas]
    return mean(flat)


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


CLIPPING: dict[str, tuple[dict[str, Any], Callable[[nn.Module], object]]] = {
    "no clipping": ({}, lambda model: None),
    "by norm": ({"gradient_clip_val": 0.2}, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2)),
    "by value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    ),
}


@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clipping", list(CLIPPING))
def test_follows_algorithm_1(aggregation: str, accumulate: int, clipping: str, tmp_path: Path) -> None:
    """Validation sees the average of the replicas, bit for bit, after each epoch; training goes on from them."""
    arguments, clip = CLIPPING[clipping]
    settings: dict[str, Any] = {"delta": 0.1 * accumulate, "aggregation": aggregation, "smoothing": 0.3}
    module = {"optimizer": "adamw"}
    outcomes = fit_on(2, tmp_path, settings, module, accumulate_grad_batches=accumulate, **arguments)
    seen = [outcome["seen"] for outcome in outcomes]
    for epoch in (1, 2):
        expected = expected_average(seen, 8 * epoch, 8, module, accumulate, clip=clip, **settings)
        for outcome in outcomes:
            assert torch.equal(outcome["validated_with"][epoch - 1], expected)
    assert all(torch.equal(outcome["weights"], expected) for outcome in outcomes)
    assert 0 < outcomes[0]["metrics"]["selsync/lssr"] < 1


def test_four_ranks_with_batch_norm_and_schedule(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"delta": 0.1, "smoothing": 0.3}
    outcomes = fit_on(4, tmp_path, settings, {"batch_norm": True})
    expected = expected_average([o["seen"] for o in outcomes], 8, 4, {"batch_norm": True}, **settings)
    for outcome in outcomes:
        assert torch.equal(outcome["weights"], expected)


def test_delta_zero_with_gradients_is_ddp(tmp_path: Path) -> None:
    module = {"optimizer": "adamw", "scheduler": True}
    settings = {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"}
    expected = fit_on(2, tmp_path, "ddp", module, gradient_clip_val=0.5)
    for outcome, ddp in zip(fit_on(2, tmp_path, settings, module, gradient_clip_val=0.5), expected, strict=True):
        assert outcome["seen"] == ddp["seen"]
        assert outcome["steps"] == ddp["steps"]
        assert torch.equal(outcome["weights"], ddp["weights"])
        assert outcome["metrics"]["val_loss"] == ddp["metrics"]["val_loss"]


# --- the order of the data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_seldp_order(world_size: int, tmp_path: Path) -> None:
    """Fig. 7b: rank r trains chunks r, r+1, ...; as many steps as DDP; no sample twice in a step."""
    outcomes = fit_on(world_size, tmp_path, LOCAL, max_epochs=world_size)
    steps_per_epoch = SAMPLES // world_size // 4
    chunks: dict[int, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        assert outcome["steps"] == steps_per_epoch * world_size
        seen = outcome["seen"]
        assert sorted(joined(seen)) == list(range(SAMPLES))
        for epoch in range(world_size):
            chunk = joined(seen[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch])
            assert chunks.setdefault((rank + epoch) % world_size, chunk) == chunk
    for step in range(steps_per_epoch * world_size):
        together = joined(outcome["seen"][step] for outcome in outcomes)
        assert len(set(together)) == len(together)


def test_full_pass(tmp_path: Path) -> None:
    for outcome in fit_on(2, tmp_path, {**LOCAL, "full_pass": True}, max_epochs=1):
        assert sorted(joined(outcome["seen"])) == list(range(SAMPLES))


@pytest.mark.parametrize("limit", [2, 0.25])
def test_a_limit_on_batches_leaves_nothing_out_for_ever(limit: float, tmp_path: Path) -> None:
    """2 of 8 batches an epoch: the queue goes on where the epoch ended, and 8 epochs cover the data set."""
    outcomes = fit_on(2, tmp_path, LOCAL, max_epochs=8, limit_train_batches=limit)
    for outcome in outcomes:
        assert len(outcome["seen"]) == 16
        assert sorted(joined(outcome["seen"])) == list(range(SAMPLES))
    for step in range(16):
        assert not set(outcomes[0]["seen"][step]) & set(outcomes[1]["seen"][step])


def test_drop_last_leaves_nothing_out_for_ever(tmp_path: Path) -> None:
    """Chunks of 32 in batches of 5: the last 2 samples open the next epoch."""
    outcomes = fit_on(2, tmp_path, LOCAL, loader={"batch_size": 5, "drop_last": True}, max_epochs=3)
    for outcome in outcomes:
        assert {len(batch) for batch in outcome["seen"]} == {5}
        assert len(outcome["seen"]) == 18
        assert set(joined(outcome["seen"])) == set(range(SAMPLES))


class Stream(IterableDataset):
    """Hands each rank samples of its own."""

    def __iter__(self) -> Any:
        data = dataset()
        return iter([data[i] for i in range(int(os.environ["RANK"]), SAMPLES, 2)])


class PairSampler(BatchSampler):
    """A batch sampler of the user's own: it hands out pairs, whatever the batch size."""

    def __iter__(self) -> Any:
        indices = list(self.sampler)
        return iter([indices[i : i + 2] for i in range(0, len(indices), 2)])

    def __len__(self) -> int:
        return len(self.sampler) // 2


def fit_loader(directory: Path, kind: str, settings: dict[str, Any], **kwargs: Any) -> tuple[list[Any], str, str]:
    data = dataset()
    if kind == "iterable":
        loader = DataLoader(Stream(), batch_size=4)
    elif kind == "sampler":
        loader = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    elif kind == "batch sampler":
        loader = DataLoader(data, batch_sampler=PairSampler(torch.utils.data.SequentialSampler(data), 2, False))
    elif kind == "own SelDP":
        rank = int(os.environ["RANK"])
        loader = DataLoader(data, batch_size=4, sampler=SelDPSampler(data, 2, rank, shuffle=False))
    else:
        loader = DataLoader(data, batch_size=4)
    model = Classifier()
    run = trainer(SelSyncStrategy(**settings), 2, directory, max_epochs=1, **kwargs)
    run.fit(model, loader)
    used = run.train_dataloader
    return model.seen, type(used.batch_sampler.sampler).__name__, type(used.batch_sampler).__name__


@pytest.mark.parametrize(
    ("kind", "kwargs", "sampler", "batch_sampler", "first"),
    [
        ("plain", {}, "SelDPSampler", "BatchSampler", None),
        ("plain", {"use_distributed_sampler": False}, "SequentialSampler", "BatchSampler", [0, 1, 2, 3]),
        ("plain", {"overfit_batches": 2}, "DistributedSampler", "BatchSampler", None),
        ("sampler", {}, "DistributedSamplerWrapper", "BatchSampler", None),
        ("batch sampler", {}, "SelDPSampler", "PairSampler", None),
        ("own SelDP", {}, "SelDPSampler", "BatchSampler", [0, 1, 2, 3]),
        ("iterable", {}, "_InfiniteConstantSampler", "BatchSampler", [0, 2, 4, 6]),
    ],
)
def test_loaders_are_respected(
    kind: str, kwargs: dict[str, Any], sampler: str, batch_sampler: str, first: list[int] | None, tmp_path: Path
) -> None:
    seen, used_sampler, used_batch_sampler = launch(
        partial(fit_loader, tmp_path, kind, LOCAL, **kwargs), 2, init=False
    )[0]
    assert (used_sampler, used_batch_sampler) == (sampler, batch_sampler)
    assert first is None or seen[0] == first
    if kind == "batch sampler":
        assert {len(batch) for batch in seen} == {2}


def test_data_injection(tmp_path: Path) -> None:
    """alpha = beta = 0.5 of 4 ranks: batches of b' = 8 / (1 + 0.25 * 4) = 4, and 2 ranks share 2 samples with all."""
    settings = {**LOCAL, "injection": (0.5, 0.5)}
    outcomes = fit_on(4, tmp_path, settings, loader={"batch_size": 8}, max_epochs=2)
    for step in range(8):
        batches = [outcome["seen"][step] for outcome in outcomes]
        own = [batch[:4] for batch in batches]
        received = [batch[4:] for batch in batches]
        sharing = [rank for rank in range(4) if len(received[rank]) == 2]
        assert len(sharing) == 2
        for rank in range(4):
            others = [r for r in sharing if r != rank]
            assert len(received[rank]) == 2 * len(others)
            for i, other in enumerate(others):
                assert set(received[rank][2 * i : 2 * i + 2]) <= set(own[other])


# --- who sees the average -----------------------------------------------------------------------------------------


def run_stages(directory: Path) -> dict[str, Any]:
    model = Classifier()
    run = trainer(SelSyncStrategy(**LOCAL), 2, directory)
    run.fit(model, train_loader())
    fitted = model.weights()
    validated = run.validate(model, val_loader(), verbose=False)
    tested = run.test(model, val_loader(), verbose=False)
    predicted = run.predict(model, val_loader())
    return {"fitted": fitted, "same": torch.equal(fitted, model.weights()), "results": [validated, tested, predicted]}


def test_validate_test_and_predict_after_fit(tmp_path: Path) -> None:
    first, second = launch(partial(run_stages, tmp_path), 2, init=False)
    assert first["same"]
    assert torch.equal(first["fitted"], second["fitted"])
    assert first["results"][:2] == second["results"][:2]


class WatchWeights(pl.Callback):
    """Keeps the weights that a callback finds at each step and at the ends."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.steps: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Classifier, *args: Any) -> None:
        self.steps.append(pl_module.weights())

    def on_train_epoch_end(self, trainer: Any, pl_module: Classifier) -> None:
        self.found["epoch"] = pl_module.weights()

    def on_train_end(self, trainer: Any, pl_module: Classifier) -> None:
        self.found["end"] = pl_module.weights()


def fit_watching(directory: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    watch = WatchWeights()
    fit(directory, LOCAL, callbacks=[watch], limit_val_batches=0)
    return watch.found, watch.steps


def test_callbacks_find_the_average(tmp_path: Path) -> None:
    outcomes = launch(partial(fit_watching, tmp_path), 2, init=False)
    average = mean([steps[-1] for _, steps in outcomes])
    for found, _ in outcomes:
        assert torch.equal(found["epoch"], average)
        assert torch.equal(found["end"], average)


def fit_averaging(directory: Path, kind: str, strategy: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    callbacks = {"ema": EMAWeightAveraging(decay=0.8), "swa": StochasticWeightAveraging(0.05, 1, annealing_epochs=1)}
    watch = WatchWeights()
    outcome = fit(directory, strategy, {"batch_norm": True}, callbacks=[watch, callbacks[kind]], max_epochs=4)
    return outcome["weights"], outcome["validated_with"], watch.steps


def test_ema_is_that_of_the_average(tmp_path: Path) -> None:
    """The EMA of each rank's replica, averaged, is the EMA of the averaged replicas: checked on every batch end."""
    outcomes = launch(partial(fit_averaging, tmp_path, "ema", LOCAL), 2, init=False)
    averages = [mean(list(step)).double() for step in zip(*(steps for _, _, steps in outcomes), strict=True)]
    ema = averages[0]
    for average in averages[1:]:
        ema = 0.8 * ema + 0.2 * average
    for weights, validated_with, _ in outcomes:
        torch.testing.assert_close(weights.double(), ema, rtol=1e-4, atol=1e-5)
        assert torch.equal(weights, outcomes[0][0])
        for mine, first in zip(validated_with, outcomes[0][1], strict=True):
            assert torch.equal(mine, first)


def test_swa_sees_the_average(tmp_path: Path) -> None:
    """With delta=0 as under DDP; with local steps the same weights on all ranks."""
    exact = {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"}
    ddp = launch(partial(fit_averaging, tmp_path, "swa", "ddp"), 2, init=False)
    same = launch(partial(fit_averaging, tmp_path, "swa", exact), 2, init=False)
    parameters = 6 * 10 + 10 + 10 + 10  # BatchNorm's buffers after them are not averaged by DDP
    assert torch.equal(ddp[0][0][:parameters], same[0][0][:parameters])
    local = launch(partial(fit_averaging, tmp_path, "swa", LOCAL), 2, init=False)
    assert torch.equal(local[0][0], local[1][0])
    assert not torch.equal(local[0][0], same[0][0])


def test_metrics_are_logged(tmp_path: Path) -> None:
    for outcome in fit_on(2, tmp_path, {"delta": 0.1}):
        metrics = outcome["metrics"]
        assert metrics["selsync/delta"] == pytest.approx(0.1)
        assert 0 <= metrics["selsync/lssr"] <= 1
        assert math.isfinite(metrics["selsync/relative_gradient_change"])
        assert metrics["selsync/mib_sent"] > 0
        assert metrics["selsync/exposed_seconds"] > 0
        assert outcome["shown"] == ["selsync/lssr", "selsync/mib_sent", "selsync/relative_gradient_change"]
