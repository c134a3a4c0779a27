"""Loss scaling, manual optimization, several optimizers and parameter groups."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipesync import SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import Classifier, Manual, scaling, train_loader, trainer, val_loader

EXACT = {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"}


class Overflowing(Classifier):
    """Its loss is infinite on rank 1 in one step."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        overflows = self.global_step == 3 and os.environ["RANK"] == "1" and len(self.seen) == 4
        return loss * float("inf") if overflows else loss


class TwoGroups(Classifier):
    """Two parameter groups with settings of their own."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed, "lr": 0.02}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


class ManualClipping(Manual):
    """It clips by hand, before the step: each rank its own gradient."""

    def clip(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5)


MODULES = {
    "overflow": Overflowing,
    "groups": TwoGroups,
    "clipping": ManualClipping,
}


def fit(directory: Path, kind: str, strategy: Any, scaled: bool = False, **kwargs: Any) -> dict[str, Any]:
    model = MODULES[kind]()
    chosen = SelSyncStrategy(**strategy) if isinstance(strategy, dict) else strategy
    run = trainer(chosen, 2, directory, plugins=[scaling()] if scaled else [], **kwargs)
    run.fit(model, train_loader(), val_loader())
    scaler = getattr(run.precision_plugin, "scaler", None)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return {"weights": model.weights(), "scale": scaler.get_scale() if scaler else None, "metrics": metrics}


class Fused(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4, sparse=True)


REFUSED: dict[str, tuple[type[Classifier], dict[str, Any], str]] = {
    "fused": (Fused, {"plugins": [scaling()]}, "fused=False"),
    "sparse": (Sparse, {}, "embedding"),
}


def fit_refused(directory: Path, kind: str) -> tuple[str, str] | None:
    module, kwargs, _ = REFUSED[kind]
    return raised(lambda: trainer("selsync", 2, directory, **kwargs).fit(module(), train_loader()))


AGGREGATIONS = ("parameters", "gradients")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    run = partial(fit, folder)
    cases: dict[Any, Any] = {kind: partial(fit_refused, folder, kind) for kind in REFUSED}
    for name, strategy in (("ddp", "ddp"), ("exact", EXACT)):
        cases[name, "overflow"] = partial(run, "overflow", strategy, scaled=True)
        for precision in ("bf16-mixed", "64-true"):
            cases[name, precision] = partial(run, "groups", strategy, precision=precision)
    for aggregation in AGGREGATIONS:
        for delta in (0.0, 0.3):
            settings = {"delta": delta, "aggregation": aggregation}
            cases[aggregation, delta] = partial(run, "overflow", settings, scaled=True)
        cases["clipping", aggregation] = partial(run, "clipping", {"delta": 0.05, "aggregation": aggregation})
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_two_groups_with_delta_zero_are_as_under_ddp(precision: str, trained: Outcomes) -> None:
    expected, rtol = trained["ddp", precision][0]["weights"], 1e-3 if "bf16" in precision else 0
    for outcome in trained["exact", precision]:
        torch.testing.assert_close(outcome["weights"], expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_overflow_on_one_rank(aggregation: str, delta: float, trained: Outcomes) -> None:
    """It stays an event of that step: with delta=0 all ranks stay the same; nobody's weights become infinite."""
    outcomes = trained[aggregation, delta]
    for outcome in outcomes:
        assert outcome["weights"].isfinite().all()
        assert torch.equal(outcome["weights"], outcomes[0]["weights"])
    assert outcomes[1]["scale"] == 2.0**15, "the scale of the rank that overflowed is halved"
    if aggregation == "gradients" and delta == 0:
        assert outcomes[0]["scale"] == 2.0**15, "as under DDP, an overflow on one rank is one on all"
        assert torch.equal(trained["exact", "overflow"][0]["weights"], trained["ddp", "overflow"][0]["weights"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_manual_optimization(aggregation: str, trained: Outcomes) -> None:
    outcomes = trained["clipping", aggregation]
    assert torch.equal(outcomes[0]["weights"], outcomes[1]["weights"])
    assert 0 <= outcomes[0]["metrics"]["selsync/lssr"] < 1


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(kind: str, trained: Outcomes) -> None:
    for outcome in trained[kind]:
        assert_refused({REFUSED[kind][2]: outcome})
