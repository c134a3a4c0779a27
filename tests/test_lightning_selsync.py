"""`Trainer(strategy="selsync")` on real processes: training, and who sees the average."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_pipesync import SelSyncStrategy
from tests.case_table import Outcomes, launch_cases
from tests.lightning_models import LOCAL, Classifier, dataset, fit, fit_on, train_loader, trainer, val_loader
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


ADAMW = {"optimizer": "adamw"}
#: The aggregation, the batches that make a step, and how gradients are clipped.
ALGORITHMS = [("parameters", 1, "by norm"), ("gradients", 3, "by value"), ("parameters", 3, "no clipping")]
EMA_STRATEGIES: dict[str, dict[str, Any]] = {
    "SelSync": LOCAL,
    "local SGD": {"name": "local_sgd", "period": 5},
    "local SGD, overlapped": {"name": "local_sgd", "period": 4, "overlap_steps": 3},
}


def settings_of(aggregation: str, accumulate: int) -> dict[str, Any]:
    return {"delta": 0.1 * accumulate, "aggregation": aggregation, "smoothing": 0.3}


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


def fit_watching(directory: Path, strategy: Any, ema: bool) -> dict[str, Any]:
    watch, averaging = WatchWeights(), [EMAWeightAveraging(decay=0.8)] if ema else []
    how = {"max_epochs": 4} if ema else {"limit_val_batches": 0}
    outcome = fit(directory, strategy, {"batch_norm": ema}, callbacks=[watch, *averaging], **how)
    return {**outcome, "found": watch.found, "each": watch.steps}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("trained")
    cases: dict[Any, Any] = {
        "stages": partial(run_stages, folder),
        "watched": partial(fit_watching, folder, LOCAL, ema=False),
    }
    for aggregation, accumulate, clipping in ALGORITHMS:
        arguments = {"accumulate_grad_batches": accumulate, **CLIPPING[clipping][0]}
        cases[aggregation, accumulate] = partial(fit, folder, settings_of(aggregation, accumulate), ADAMW, **arguments)
    for name, strategy in EMA_STRATEGIES.items():
        cases["EMA", name] = partial(fit_watching, folder, strategy, ema=True)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize(("aggregation", "accumulate", "clipping"), ALGORITHMS)
def test_follows_algorithm_1(aggregation: str, accumulate: int, clipping: str, trained: Outcomes) -> None:
    """Validation sees the average of the replicas, bit for bit, after each epoch; training goes on from them."""
    settings, clip = settings_of(aggregation, accumulate), CLIPPING[clipping][1]
    outcomes = trained[aggregation, accumulate]
    seen = [outcome["seen"] for outcome in outcomes]
    for epoch in (1, 2):
        expected = expected_average(seen, 8 * epoch, 8, ADAMW, accumulate, clip=clip, **settings)
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


def test_callbacks_find_the_average(trained: Outcomes) -> None:
    outcomes = trained["watched"]
    average = mean([outcome["each"][-1] for outcome in outcomes])
    for outcome in outcomes:
        assert torch.equal(outcome["found"]["epoch"], average)
        assert torch.equal(outcome["found"]["end"], average)


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
