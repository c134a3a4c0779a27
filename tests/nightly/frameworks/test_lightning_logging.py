"""What the strategy logs, and when."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_pipesync import SelSync, SelSyncStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised
from tests.support.lightning_models import Classifier, Fetching, Manual, Memory, fit, train_loader, trainer


def fit_logging(directory: Path, kind: str, **kwargs: Any) -> tuple[list[Any], int]:
    """Returns the rows, and how often the method was asked for its metrics."""
    model = Manual() if kind == "manual" else Classifier()
    memory = Memory()
    run = trainer(SelSyncStrategy(delta=0.1), 2, directory, logger=memory, max_epochs=3, **kwargs)
    with patch.object(SelSync, "metrics", autospec=True, side_effect=SelSync.metrics) as metrics:
        run.fit(model, train_loader())
    return [(step, set(row)) for step, row in memory.rows], metrics.call_count


#: How gradients are computed, arguments of the Trainer, and the steps that are logged; epochs are besides.
ROWS: list[tuple[str, dict[str, Any], list[int]]] = [
    ("automatic", {"log_every_n_steps": 3}, [2, 5, 8, 11, 14, 17, 20, 23]),
    ("automatic", {"log_every_n_steps": 3, "accumulate_grad_batches": 2}, [2, 5, 8, 11]),
    ("manual", {"log_every_n_steps": 3}, [2, 5, 8, 11, 14, 17, 20, 23]),
    ("automatic", {"log_every_n_steps": 50}, []),
    ("automatic", {"log_every_n_steps": 0}, []),
]


def fit_fetching(directory: Path, settings: dict[str, Any]) -> tuple[Any, int, set[str], Tensor]:
    model = Fetching()
    run = trainer(SelSyncStrategy(**settings), 2, directory)
    outcome = raised(lambda: run.fit(model, train_loader()))
    return outcome, len(model.seen), set(run.callback_metrics), model.weights()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        "fetching": partial(fit_fetching, folder, {"delta": 0.1}),
        "injection": partial(fit_fetching, folder, {"injection": (0.5, 0.5)}),
        "metrics": partial(fit, folder, {"delta": 0.1}),
    }
    for kind, kwargs, _ in ROWS:
        cases[kind, str(kwargs)] = partial(fit_logging, folder, kind, **kwargs)
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize(("kind", "kwargs", "steps"), ROWS)
def test_every_row_has_the_metrics(kind: str, kwargs: dict[str, Any], steps: list[int], trained: Outcomes) -> None:
    """3 epochs of 8 batches; on other batches than those that are logged nothing is measured."""
    for rank, (rows, measured) in enumerate(trained[kind, str(kwargs)]):
        in_step = [(step, names) for step, names in rows if "loss" in names]
        in_epoch = [(step, names) for step, names in rows if "loss" not in names]
        assert [step for step, _ in in_step] == steps
        for _, names in in_step:
            assert {"selsync/lssr", f"selsync/mib_sent/rank_{rank}", f"selsync/exposed_seconds/rank_{rank}"} <= names
            assert "selsync/mib_sent" not in names
        last = [8 * (epoch + 1) // kwargs.get("accumulate_grad_batches", 1) - 1 for epoch in range(3)]
        assert [step for step, _ in in_epoch] == last
        for _, names in in_epoch:
            assert {"selsync/lssr", "selsync/mib_sent", "selsync/exposed_seconds"} <= names
        assert measured == 1 + len(rows)


def test_a_training_step_that_takes_the_iterator(trained: Outcomes) -> None:
    """It trains and logs; data injection, which sees no batch there, is refused."""
    outcomes = trained["fetching"]
    for outcome, num_batches, metrics, weights in outcomes:
        assert outcome is None
        assert num_batches == 16
        assert "selsync/lssr" in metrics
        assert torch.equal(weights, outcomes[0][3])
    for outcome, num_batches, _, _ in trained["injection"]:
        assert_refused({"injection=(0.5, 0.5)": outcome, "dataloader_iter": outcome})
        assert num_batches == 0


def test_metrics_are_logged(trained: Outcomes) -> None:
    for outcome in trained["metrics"]:
        metrics = outcome["metrics"]
        assert metrics["selsync/delta"] == pytest.approx(0.1)
        assert 0 <= metrics["selsync/lssr"] <= 1
        assert math.isfinite(metrics["selsync/relative_gradient_change"])
        assert metrics["selsync/mib_sent"] > 0
        assert metrics["selsync/exposed_seconds"] > 0
        assert outcome["shown"] == ["lssr", "sent_MiB"]
