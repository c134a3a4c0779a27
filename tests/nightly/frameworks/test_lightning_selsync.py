"""`Trainer(strategy="selsync")` on real processes: training, and who sees the average."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_pipesync import SelSyncStrategy
from tests.references.selsync import mean, simulate
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import LOCAL, Classifier, dataset, fit, train_loader, trainer, val_loader
from tests.support.models import OPTIMIZERS

EMA_STRATEGIES: dict[str, dict[str, Any]] = {
    "SelSync": LOCAL,
    "local SGD": {"name": "local_sgd", "period": 5},
    "local SGD, overlapped": {"name": "local_sgd", "period": 4, "overlap_steps": 3},
}
#: Local steps without validation, and steps of both kinds with it.
WATCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "callbacks": (LOCAL, {"limit_val_batches": 0}),
    "validation": ({"delta": 0.1, "smoothing": 0.3}, {}),
}


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


def fit_watching(directory: Path, strategy: Any, batch_norm: bool = False, ema: bool = False, **how: Any) -> Any:
    watch, averaging = WatchWeights(), [EMAWeightAveraging(decay=0.8)] if ema else []
    outcome = fit(directory, strategy, {"batch_norm": batch_norm}, callbacks=[watch, *averaging], **how)
    return {**outcome, "found": watch.found, "each": watch.steps}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {"stages": partial(run_stages, folder)}
    for name, (settings, how) in WATCHED.items():
        cases["watched", name] = partial(fit_watching, folder, settings, **how)
    for name, strategy in EMA_STRATEGIES.items():
        cases["EMA", name] = partial(fit_watching, folder, strategy, batch_norm=True, ema=True, max_epochs=4)
    return launch_cases(cases, 2, init=False)


def test_batch_norm_on_four_ranks_follows_algorithm_1(folder: Path) -> None:
    """Weights and buffers, bit for bit at every step; all ranks have the same ones after a synchronized step."""
    settings = {"delta": 0.3, "smoothing": 0.3}
    outcomes = launch_cases({"": partial(fit_watching, folder, settings, batch_norm=True)}, 4, init=False)[""]

    def loss(model: Classifier, step: int, rank: int) -> Tensor:
        _, x, y = dataset()[outcomes[rank]["seen"][step]]
        return nn.functional.cross_entropy(model.model(x), y)

    for number in range(1, len(outcomes[0]["each"]) + 1):
        given = {"world_size": 4, "num_steps": number, **settings}
        replicas, synchronized, _ = simulate(Classifier(batch_norm=True), OPTIMIZERS["sgd"], loss, **given)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            assert torch.equal(outcome["each"][number - 1], replica.weights())
        same = all(torch.equal(replica.weights(), replicas[0].weights()) for replica in replicas)
        assert same == synchronized[-1]
    assert 1 < sum(synchronized) < number
    average = mean([replica.weights() for replica in replicas])
    assert all(torch.equal(outcome["weights"], average) for outcome in outcomes)


def test_validate_test_and_predict_after_fit(trained: Outcomes) -> None:
    """Their results are those of the averaged model, computed by hand; rank r predicts samples r, r+2, ..."""
    outcomes = trained["stages"]
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


@pytest.mark.parametrize("name", WATCHED)
def test_validation_and_callbacks_find_the_average(name: str, trained: Outcomes) -> None:
    """Bit for bit, at the end of each epoch; each rank trains on from its own replica."""
    outcomes = trained["watched", name]
    averages = [mean(list(step)) for step in zip(*(outcome["each"] for outcome in outcomes), strict=True)]
    for outcome in outcomes:
        expected = [averages[15]] * 3 + ([averages[7], averages[15]] if name == "validation" else [])
        found = [outcome["weights"], outcome["found"]["epoch"], outcome["found"]["end"], *outcome["validated_with"]]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert not all(torch.equal(own, average) for own, average in zip(outcome["each"], averages, strict=True))
    assert name == "callbacks" or 0 < outcomes[0]["metrics"]["selsync/lssr"] < 1


@pytest.mark.parametrize("name", EMA_STRATEGIES)
def test_ema_is_that_of_the_average(name: str, trained: Outcomes) -> None:
    """The EMA of each rank's replica, averaged, is the EMA of the averaged replicas: checked on every batch end."""
    outcomes = trained["EMA", name]
    averages = [mean(list(step)).double() for step in zip(*(outcome["each"] for outcome in outcomes), strict=True)]
    ema = averages[0]
    for average in averages[1:]:
        ema = 0.8 * ema + 0.2 * average
    for outcome in outcomes:
        torch.testing.assert_close(outcome["weights"].double(), ema, rtol=1e-4, atol=1e-5)
        assert torch.equal(outcome["weights"], outcomes[0]["weights"])
        assert all(map(torch.equal, outcome["validated_with"], outcomes[0]["validated_with"]))
