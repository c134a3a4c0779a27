"""A plan that is made in a Trainer's run, of a LightningModule, and the report of what its batches take."""

from __future__ import annotations

import json
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import DeARStrategy, PlanCallback, StepReport
from lightning_pipesync.lab.bench.candidates import in_ddp
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.report import as_markdown
from lightning_pipesync.lab.plan.saved import read_plan
from lightning_pipesync.lab.plan.trials import run_in_turns
from lightning_pipesync.lab.predictions.entry import Prediction
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import raised
from tests.support.lightning_models import Classifier, Memory, train_loader, trainer

# --- a plan -----------------------------------------------------------------------------------------------------------


def fit(folder: Path, plans: bool) -> Tensor:
    model = Classifier()
    callbacks = [PlanCallback(folder, num_steps=4)] if plans else []
    trainer("ddp", 2, folder, callbacks=callbacks, accumulate_grad_batches=2, max_epochs=3).fit(model, train_loader())
    return model.weights()


def fit_both(folder: Path) -> tuple[Tensor, Tensor, str]:
    """Returns the weights with and without a plan, and the plan read again, where the same methods are registered."""
    planned, plain = (fit(folder, plans) for plans in (True, False))
    return planned, plain, as_markdown(*read_plan(folder / "plan.json"))


class Sharded(Classifier):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh)  # type: ignore[arg-type]


def refusals(folder: Path) -> list[Any]:
    def fit_on(strategy: Any, callback: Any, model: type[Classifier] = Classifier) -> Any:
        return raised(lambda: trainer(strategy, 2, folder, callbacks=[callback]).fit(model(), train_loader()))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        too_short = fit_on("ddp", PlanCallback(folder, num_steps=1000))
        (plan := folder / os.environ["RANK"]).mkdir(parents=True)
        predictions = [{"method": "ddp", "settings": {}, "seconds": 1e-9}]
        (plan / "plan.json").write_text(json.dumps({"results": [{"predictions": predictions}]}))
        sharded = fit_on(ModelParallelStrategy(), StepReport(plan / "plan.json", every_n_batches=2), Sharded)
    refused = [fit_on(DeARStrategy(), PlanCallback(folder))]
    refused += [fit_on(ModelParallelStrategy(), PlanCallback(folder), Sharded)]
    return [refused, [too_short, sharded], [str(one.message) for one in said]]


def test_a_run_makes_its_own_plan_and_goes_on(trained: Outcomes, folder: Path) -> None:
    """It trains what it does without, and what is read again is the same plan."""
    for planned, plain, read_again in trained["planned"]:
        assert torch.equal(planned, plain)
        assert (folder / "planned" / "plan.md").read_text() == read_again
    work, cluster, _ = read_plan(folder / "planned" / "plan.json")
    assert cluster.world_size == 2
    assert work.num_bytes == 4 * sum(parameter.numel() for parameter in Classifier().parameters())
    assert work.measured["pipe_sgd"].seconds > 0
    assert (folder / "planned" / "plan.png").exists()


def test_where_no_plan_is_made(trained: Outcomes, folder: Path) -> None:
    with pytest.raises(ValueError, match="num_steps must be positive"):
        PlanCallback(num_steps=0)
    told: list[bool] = []
    for refused, trains, said in trained["refused"]:
        for strategy, of in zip(refused, ("DeARStrategy", "ModelParallelStrategy"), strict=True):
            assert f"PlanCallback plans for several ranks in DDP, and this Trainer has 2 and {of}" in strategy[1]
        assert trains == [None, None]
        told.append(any("no plan was made" in text for text in said))
        assert not any("was planned" in text for text in said), "a sharded model is not DDP's"
    assert told == [True, False]
    assert not (folder / "refused" / "plan.json").exists()


# --- a plan of a LightningModule --------------------------------------------------------------------------------------


class Scaled(LightningModule):
    """Has a parameter of its own, and its training step, a dictionary for a loss, calls the module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return {"loss": loss}


def scaled() -> Any:
    return Scaled(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)


def by_hand() -> Any:
    module = Scaled()
    module.automatic_optimization = False
    return module, scaled()[1]


def settings_of(name: str) -> PlanSettings:
    return PlanSettings(f"{__name__}:{name}", 1, 1, 1, 1)


def run_all() -> dict[str, dict[str, Any]]:
    chosen = [Prediction("ddp", {"bucket_mb": 1.0}), Prediction("dear", {"fusion": "buffer"})]
    chosen += [Prediction(method) for method in ("pipe_sgd", "selsync", "local_sgd", "parameter_server")]
    return run_in_turns(chosen, settings_of("scaled"), lambda _: None)


def gradients_in_ddp() -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a batch that differs between ranks, by DDP and averaged by hand."""
    model = settings_of("scaled").build()
    batch = [torch.full((4, 4), 1.0 + dist.get_rank())]
    model.loss(model.module, batch).backward()
    expected = [parameter.grad.clone() for parameter in model.module.parameters() if parameter.grad is not None]
    for gradient in expected:
        dist.all_reduce(gradient)
    module = in_ddp(model.module, 1.0)
    for _ in range(2):  # a training step within the forward pass leaves no trace
        module.zero_grad()
        model.loss(module, batch).backward()
    return [gradient / 2 for gradient in expected], [p.grad for p in model.module.parameters() if p.grad is not None]


def test_all_methods_run_a_lightning_module_and_ddp_reduces_its_gradients() -> None:
    found = launch_cases({"all": run_all, "gradients": gradients_in_ddp}, 2)
    for measured in found["all"]:
        assert all("seconds" in outcome for outcome in measured.values()), measured
        assert len(measured) == 6
    for expected, gradients in found["gradients"]:
        assert len(gradients) == 3
        torch.testing.assert_close(gradients, expected)


def test_a_module_with_manual_optimization_has_no_loss() -> None:
    with pytest.raises(ValueError, match=r"Scaled has automatic_optimization=False.*return \(module, batch, loss\)"):
        settings_of("by_hand").build()


# --- a report ---------------------------------------------------------------------------------------------------------


class Timed(Classifier):
    """By ``clock``, a batch takes 1e6 s; on rank 1 twice as long after 13, and 5 times after 17. Or its loss is 0."""

    def __init__(self, fault: str, clock: mock.Mock) -> None:
        super().__init__()
        self.fault, self.clock, self.count = fault, clock, 0

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        slow = self.fault == "slow" and self.global_rank == 1
        self.clock.return_value += 1e6 * (5 if slow and self.count > 17 else 2 if slow and self.count > 13 else 1)
        loss = super().training_step(batch, batch_idx)
        return loss * 0.0 if self.fault == "flat" else loss


def report(folder: Path, fault: str) -> tuple[list[dict[str, float]], list[str]]:
    """Trains 24 batches; returns what was logged and said."""
    folder = folder / os.environ["RANK"]
    folder.mkdir(parents=True)
    predictions = [
        {"method": "dear", "settings": {"compression": "int8"}, "seconds": 1e-6},
        {"method": "dear", "settings": {"compression": "none"}, "seconds": 1e7 if fault == "slow" else 5e5},
        {"method": "dear", "settings": {"compression": "none", "bucket_mb": 25.0, "low_rank": 4}, "seconds": 1e-6},
    ]
    (folder / "plan.json").write_text(json.dumps({"results": [{"predictions": predictions}]}))
    memory, callback, clock = Memory(), StepReport(folder / "plan.json", every_n_batches=4), mock.Mock(return_value=0.0)
    with (
        mock.patch("lightning_pipesync.lightning.step_report.perf_counter", clock),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        run = trainer("dear", 2, folder, callbacks=[callback], logger=memory, max_epochs=3)
        run.fit(Timed(fault, clock), train_loader())
    return [row for _, row in memory.rows], [str(one.message) for one in said]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {name: partial(report, folder / f"report {name}", name) for name in ("slow", "flat", "")}
    cases |= {"planned": partial(fit_both, folder / "planned"), "refused": partial(refusals, folder / "refused")}
    return launch_cases(cases, 2, init=False)


def times_as_long(said: list[str]) -> list[str]:
    """Returns how much slower than at the start a rank said that it is."""
    found = (re.search(r"its computation of a batch takes (.*) times as long as at the start", text) for text in said)
    return [ratio[1] for ratio in found if ratio]


def test_what_becomes_slower_is_told_where_it_does(trained: Outcomes) -> None:
    """What is told once does not hide what is worse."""
    (rows, first), (_, second) = trained["slow"]
    assert (times_as_long(first), times_as_long(second)) == ([], ["2.0", "5.0"])
    assert not any("was planned" in text for text in first)
    waited = [row["step_report/waited"] for row in rows if "step_report/waited" in row]
    assert len(waited) == 4
    assert all(0 <= share <= 1 for share in waited)
    assert [row["step_report/seconds"] for row in rows if "step_report/seconds" in row] == [1e6] * 4


@pytest.mark.parametrize("fault", ["flat", ""])
def test_a_flat_loss_and_a_gradient_of_0_are_told(fault: str, trained: Outcomes) -> None:
    for rank, (_, said) in enumerate(trained[fault]):
        for words in ("the loss has been 0 for 4 batches", "all gradients are 0"):
            assert sum(words in text for text in said) == (fault == "flat"), words
        assert sum("was planned to take 500000000 ms" in text for text in said) == (rank == 0), said


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the plan\.json of pipesync plan"):
        StepReport(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="every_n_batches must be positive"):
        StepReport(every_n_batches=0)
