"""`Trainer(strategy="selsync")` on real processes: training, and who sees the average."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_pipesync import SelSyncStrategy
from tests.harness import launch
from tests.lightning_models import (
    LOCAL,
    Classifier,
    dataset,
    fit,
    fit_on,
    train_loader,
    trainer,
    val_loader,
)
from tests.models import OPTIMIZERS
from tests.reference_selsync import mean, simulate


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


CLIPPING: dict[str, tuple[dict[str, Any], Callable[[nn.Module], object]]] = {
    "no clipping": ({}, lambda model: None),
    "by norm": ({"gradient_clip_val": 0.2}, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2)),
    "by value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    ),
}


@pytest.mark.parametrize(
    ("aggregation", "accumulate", "clipping"),
    [("parameters", 1, "by norm"), ("gradients", 3, "by value"), ("parameters", 3, "no clipping")],
)
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


def run_stages(directory: Path) -> dict[str, Any]:
    model, watch = Classifier(), WatchWeights()
    run = trainer(SelSyncStrategy(**LOCAL), 2, directory, callbacks=[watch])
    run.fit(model, train_loader())
    return {
        "replica": watch.steps[-1],
        "validated": run.validate(model, val_loader(), verbose=False),
        "tested": run.test(model, val_loader(), verbose=False),
        "predicted": torch.cat(run.predict(model, val_loader())),
        "weights": model.weights(),
    }


def test_validate_test_and_predict_after_fit(tmp_path: Path) -> None:
    """Their results are those of the averaged model, computed by hand; rank r predicts samples r, r+2, ..."""
    outcomes = launch(partial(run_stages, tmp_path), 2, init=False)
    average = mean([outcome["replica"] for outcome in outcomes])
    assert not torch.equal(average, outcomes[0]["replica"])
    model = Classifier()
    nn.utils.vector_to_parameters(average, model.parameters())
    _, x, y = dataset().tensors
    with torch.no_grad():
        logits = model.model(x)
    loss = nn.functional.cross_entropy(logits, y).item()
    for rank, outcome in enumerate(outcomes):
        assert torch.equal(outcome["weights"], average)
        for results in (outcome["validated"], outcome["tested"]):
            assert results == [{"val_loss": pytest.approx(loss, rel=1e-5)}]
        torch.testing.assert_close(outcome["predicted"], logits[rank::2])


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


@pytest.mark.parametrize(
    "strategy", [LOCAL, {"name": "local_sgd", "period": 5}, {"name": "local_sgd", "period": 4, "overlap_steps": 3}]
)
def test_ema_is_that_of_the_average(strategy: dict[str, Any], tmp_path: Path) -> None:
    """The EMA of each rank's replica, averaged, is the EMA of the averaged replicas: checked on every batch end."""
    outcomes = launch(partial(fit_averaging, tmp_path, "ema", strategy), 2, init=False)
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
