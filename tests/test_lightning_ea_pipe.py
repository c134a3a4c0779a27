"""EA-Pipe in the Trainer, against the engine on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipesync import EAPipe
from tests.lightning_models import Classifier, dataset, fit_on
from tests.models import OPTIMIZERS

SPLIT = {2: (2,), 3: (2, 4)}


def engine_on(seen: list[list[int]], num_stages: int, module: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The weights of a Classifier that virtual stages have trained on the same batches."""
    model = Classifier(**(module or {}))
    make = OPTIMIZERS[model.optimizer_name]

    class Holder(nn.Module):
        def __init__(self, parameters: Any) -> None:
            super().__init__()
            self.held = nn.ParameterList(parameters)

    engine = EAPipe(
        model.model,
        nn.functional.cross_entropy,
        lambda parameters: make(Holder(parameters)),
        virtual_stages=num_stages,
        split=SPLIT[num_stages],
        **settings,
    )
    losses = []
    for indices in seen:
        _, x, y = dataset()[torch.tensor(indices)]
        losses.append(engine.train_batch((x, y)))
    engine.flush()
    return model.weights(), losses


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("module", [{}, {"optimizer": "adamw", "dropout": 0.3, "batch_norm": True}])
def test_trainer_is_the_engine(num_stages: int, module: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, dropout included; every rank has all weights, and the metrics of rank 0."""
    settings = {"name": "ea_pipe", "split": SPLIT[num_stages], "elastic_force": 0.3}
    outcomes = fit_on(num_stages, tmp_path, settings, module)
    seen = outcomes[0]["seen"]
    weights, losses = engine_on(seen, num_stages, module, elastic_force=0.3)
    for outcome in outcomes:
        assert torch.equal(outcome["weights"], weights)
        assert outcome["steps"] == 32
        assert outcome["metrics"] == outcomes[0]["metrics"]
    assert outcomes[0]["metrics"]["loss"] == pytest.approx(float(losses[-1]))
