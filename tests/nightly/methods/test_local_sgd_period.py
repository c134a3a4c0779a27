"""Periods of local SGD that are no number of steps: SelSync's trigger, and shares of an epoch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import LocalSGD, LocalSGDStrategy, PipeSyncAccelerator, PipeSyncPlugin
from tests.references.selsync import simulate
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.lightning_models import Classifier, dataset, trainer
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS = 16
EPOCH = TensorDataset(
    torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
)  # 12 batches of 2 on each of 2 ranks


# --- period="selsync" -------------------------------------------------------------------------------------------------


def train_by_gradient(optimizer_name: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Trains STEPS steps, and skips one; in the middle a new model, optimizer and method go on."""
    settings = {"period": "selsync", "lr_scale": 1.0, "bucket_mb": 1e-4, **settings}
    run = Run(LocalSGD, optimizer_name, seeded_mlp(batch_norm=True), **settings)
    for i in range(STEPS):
        if i == STEPS // 2 + 1:
            run = run.resumed(seeded_mlp(1, batch_norm=True))
        if i == 3:  # measured, and skipped by all
            run.model.eval()
            loss(run.model, 100, dist.get_rank()).backward()
            run.sync.reduce()
            run.model.train()
        run.step(i)
    outcome = state(run.model), run.sync.metrics()
    run.sync.detach()
    return outcome


#: Optimizer, settings of the trigger, further ones, and the outer step in the simulation.
BY_GRADIENT: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, float]]] = [
    ("sgd", {"delta": 0.2, "smoothing": 0.3}, {}, {}),
    ("adamw", {"delta": 0.2}, {"outer_optimizer": "nesterov"}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    ("sgd", {"delta": "auto", "lssr": 0.9, "window": 3}, {}, {}),
]


def skip_alone() -> tuple[str, str] | None:
    run = Run(LocalSGD, period="selsync", timeout_s=10)

    def skip() -> None:
        for i in range(3):
            run.backward(i)
            run.sync.reduce()
            if i != 1 or dist.get_rank() != 1:
                run.sync.step()

    outcome = raised(skip)
    run.sync.detach(timeout_s=1.0)
    return outcome


def streams_by_gradient() -> float:
    """All steps are synchronized, and an average takes three steps: the fragments wait for their turn."""
    run = Run(LocalSGD, period="selsync", delta=0.0, fragments=2, overlap_steps=3, bucket_mb=1e-4)
    run.steps(range(9))
    rounds = run.sync.metrics()["rounds"]
    run.sync.detach()
    return rounds


def test_the_gradient_decides_as_in_selsync() -> None:
    """Bit for bit what Algorithm 1 trains, resumed in between; a fragment under way is not started again."""
    cases: dict[Any, Any] = {"skips alone": skip_alone, "streams": streams_by_gradient}
    for i, (optimizer, trigger, settings, _) in enumerate(BY_GRADIENT):
        cases[i] = partial(train_by_gradient, optimizer, {**trigger, **settings})
    outcomes = launch_cases(cases, 3)
    for i, (optimizer, trigger, _, outer) in enumerate(BY_GRADIENT):
        model, given = seeded_mlp(batch_norm=True), {"world_size": 3, "num_steps": STEPS, **trigger, **outer}
        replicas, synchronized, _ = simulate(model, OPTIMIZERS[optimizer], loss, **given)
        assert 0 < sum(synchronized) < STEPS, "steps of both kinds"
        for replica, (weights, metrics) in zip(replicas, outcomes[i], strict=True):
            assert_same(weights, state(replica), i)
            assert metrics["rounds"] == sum(synchronized)
            assert metrics["lssr"] == 1 - sum(synchronized) / STEPS
    for outcome in outcomes["skips alone"]:
        assert_raised(outcome, "RuntimeError", "Rank 1 and rank 0")
    assert outcomes["streams"] == [3] * 3, "6 averages of 2 fragments: at steps 1, 2, 4, 5, 7, 8"


# --- periods longer than a training ----------------------------------------------------------------------------------


def summary_of(warmup_steps: int, num_steps: int) -> str:
    run = Run(LocalSGD, period=4, warmup_steps=warmup_steps)
    before = run.sync.metrics()
    run.steps(range(num_steps))
    line = run.sync.summary(num_steps, before)
    run.sync.detach()
    return line


def test_the_line_at_the_end_says_why_no_round_was_completed() -> None:
    lines = {
        (0, 3): "0 rounds in 3 steps, since a round takes period=4",
        (0, 4): "1 round in 4 steps",
        (3, 3): "0 rounds in 3 steps",
        (3, 4): "0 rounds in 4 steps, since a round takes period=4",
    }
    outcomes = launch_cases({numbers: partial(summary_of, *numbers) for numbers in lines}, 2)
    assert {numbers: outcomes[numbers][0] for numbers in lines} == lines


# --- shares of an epoch -----------------------------------------------------------------------------------------------


def train_in_epochs(period: int | str, warmup_steps: int) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = LocalSGD(model, optimizer, period=period, warmup_steps=warmup_steps)
    loader = sync.prepare_train_loader(DataLoader(EPOCH, 2, shuffle=True))
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            sync.step()
    outcome = state(model), sync.metrics()["rounds"]
    sync.detach()
    return outcome


def step_without_a_length() -> list[tuple[str, str] | None]:
    outcomes = []
    for settings in ({"period": "0.5 epoch"}, {"period": "0.1 epoch", "overlap_steps": 3}):
        model = nn.Linear(6, 2)
        sync = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
        if "overlap_steps" in settings:
            sync.prepare_train_loader(DataLoader(EPOCH, 2))
        model(torch.ones(1, 6)).sum().backward()
        outcomes.append(raised(sync.step))
        sync.detach()
    return outcomes


def test_a_share_of_an_epoch_is_its_steps() -> None:
    """Which have to be known, and enough."""
    kinds = [(period, warmup_steps) for period in (5, "0.4 epoch") for warmup_steps in (0, 2)]
    cases: dict[Any, Any] = {kind: partial(train_in_epochs, *kind) for kind in kinds}
    outcomes = launch_cases({**cases, "refused": step_without_a_length}, 2)
    for warmup_steps in (0, 2):
        for period in (5, "0.4 epoch"):
            for (weights, rounds), (expected, _) in zip(
                outcomes[period, warmup_steps], outcomes[5, warmup_steps], strict=True
            ):
                assert rounds == 4
                assert_same(weights, expected)
    for unknown, short in outcomes["refused"]:
        assert_raised(unknown, "ValueError", "period='0.5 epoch'", "prepare_train_loader")
        assert_raised(short, "ValueError", "overlap_steps=3", "period='0.1 epoch'")


def fit(
    directory: Path,
    period: int | str,
    save_at: int | None = None,
    resume_at: int | None = None,
    accumulate: dict[int, int] | None = None,
) -> tuple[Tensor, float]:
    """8 batches an epoch, two of which make a step, or as many as ``accumulate`` has by the epoch from which on."""
    save = ModelCheckpoint(directory, "{step}", every_n_train_steps=save_at, save_top_k=-1)
    if accumulate:  # within an epoch Lightning resumes without what the callback sets
        save = ModelCheckpoint(directory, "{step}", every_n_epochs=1, save_top_k=-1)
    callbacks: list[pl.Callback] = [save] if save_at or accumulate else []
    run = trainer(
        LocalSGDStrategy(period=period),
        2,
        directory,
        accumulate_grad_batches=1 if accumulate else 2,
        callbacks=[*callbacks, *([GradientAccumulationScheduler(accumulate)] if accumulate else [])],
        enable_checkpointing=bool(callbacks),
        max_epochs=5 if accumulate else 3,
    )
    model = Classifier()
    path = None if resume_at is None else str(directory / f"step={resume_at}.ckpt")
    run.fit(model, DataLoader(dataset(), 4, shuffle=True), ckpt_path=path)
    return model.weights(), run.callback_metrics.get("local_sgd/rounds", torch.tensor(-1.0)).item()


def test_a_share_of_an_epoch_in_a_trainer(tmp_path: Path) -> None:
    """Also in a run that resumes within an epoch.

    A period stays as long when more batches are accumulated: the first epoch has 8 steps, and the others 4.
    """
    accumulate = {0: 1, 1: 2}
    outcomes = launch_cases(
        {
            "in steps": partial(fit, tmp_path, 3),
            "whole": partial(fit, tmp_path, "0.75 epoch", 5),
            "resumed": partial(fit, tmp_path, "0.75 epoch", None, 5),
            "accumulated, in steps": partial(fit, tmp_path / "in steps", 8, accumulate=accumulate),
            "accumulated, whole": partial(fit, tmp_path, "1 epoch", accumulate=accumulate),
            "accumulated, resumed": partial(fit, tmp_path, "1 epoch", resume_at=12, accumulate=accumulate),
        },
        2,
        init=False,
    )
    for kind, num_rounds in (("", 4), ("accumulated, ", 3)):
        (expected, _), (whole, rounds), (resumed, _) = (
            outcomes[f"{kind}{how}"][0] for how in ("in steps", "whole", "resumed")
        )
        assert torch.equal(whole, expected)
        assert torch.equal(resumed, expected)
        assert rounds == num_rounds


def accelerate(period: int | str) -> Tensor:
    accelerator = PipeSyncAccelerator(PipeSyncPlugin("local_sgd", period=period), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare_train_loader(DataLoader(EPOCH, 2, shuffle=True))
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().sum())
                optimizer.step()
                optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
    accelerator.end_training()
    return weights


def test_a_share_of_an_epoch_with_accelerate() -> None:
    """Of 6 steps."""
    expected, actual = (on_ranks(accelerate, 2, period, init=False) for period in (2, "0.33 epoch"))
    assert all(map(torch.equal, actual, expected))
