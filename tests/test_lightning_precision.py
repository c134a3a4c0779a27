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
from tests.harness import launch, raised
from tests.lightning_models import Classifier, scaling, train_loader, trainer, val_loader

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


class Manual(Classifier):
    """Two optimizers, stepped by hand at different rates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def clip(self, optimizer: Any) -> None:
        """Leaves the gradient as it is."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        _, x, y = batch
        first.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.model(x), y))
        self.clip(first)
        first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.model(x), y))
            second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model[0].parameters(), 0.1), torch.optim.AdamW(self.model[2].parameters(), 0.01)]


class ManualClipping(Manual):
    """It clips by hand, before the step: each rank its own gradient."""

    def clip(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5)


MODULES = {
    "overflow": Overflowing,
    "groups": TwoGroups,
    "clipping": ManualClipping,
}


def fit(directory: Path, kind: str, strategy: Any, **kwargs: Any) -> dict[str, Any]:
    model = MODULES[kind]()
    chosen = SelSyncStrategy(**strategy) if isinstance(strategy, dict) else strategy
    run = trainer(chosen, 2, directory, **kwargs)
    run.fit(model, train_loader(), val_loader())
    scaler = getattr(run.precision_plugin, "scaler", None)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return {"weights": model.weights(), "scale": scaler.get_scale() if scaler else None, "metrics": metrics}


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_two_groups_with_delta_zero_are_as_under_ddp(precision: str, tmp_path: Path) -> None:
    ddp = launch(partial(fit, tmp_path, "groups", "ddp", precision=precision), 2, init=False)
    for outcome in launch(partial(fit, tmp_path, "groups", EXACT, precision=precision), 2, init=False):
        torch.testing.assert_close(
            outcome["weights"], ddp[0]["weights"], rtol=1e-3 if "bf16" in precision else 0, atol=0
        )


@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
def test_an_overflow_on_one_rank(aggregation: str, delta: float, tmp_path: Path) -> None:
    """It stays an event of that step: with delta=0 all ranks stay the same; nobody's weights become infinite."""
    settings = {"delta": delta, "aggregation": aggregation}
    outcomes = launch(partial(fit, tmp_path, "overflow", settings, plugins=[scaling()]), 2, init=False)
    for outcome in outcomes:
        assert outcome["weights"].isfinite().all()
        assert torch.equal(outcome["weights"], outcomes[0]["weights"])
    assert outcomes[1]["scale"] == 2.0**15, "the scale of the rank that overflowed is halved"
    if aggregation == "gradients" and delta == 0:
        assert outcomes[0]["scale"] == 2.0**15, "as under DDP, an overflow on one rank is one on all"
        ddp = launch(partial(fit, tmp_path, "overflow", "ddp", plugins=[scaling()]), 2, init=False)
        exact = launch(partial(fit, tmp_path, "overflow", EXACT, plugins=[scaling()]), 2, init=False)
        assert torch.equal(exact[0]["weights"], ddp[0]["weights"])


@pytest.mark.parametrize("settings", [{"delta": 0.05}, {"delta": 0.05, "aggregation": "gradients"}], ids=str)
def test_manual_optimization(settings: dict[str, Any], tmp_path: Path) -> None:
    outcomes = launch(partial(fit, tmp_path, "clipping", settings), 2, init=False)
    assert torch.equal(outcomes[0]["weights"], outcomes[1]["weights"])
    assert 0 <= outcomes[0]["metrics"]["selsync/lssr"] < 1


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


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_cannot_be_trained_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    for outcome in launch(fit_refused, 2, tmp_path, kind, init=False):
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert REFUSED[kind][2] in outcome[1]
