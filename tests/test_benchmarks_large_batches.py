"""`python -m benchmarks.large_batches`: that each rule does what it says, and that it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks import large_batches
from benchmarks.large_batches import LargeBatches
from lightning_pipesync.lab.bench.tasks import build_task
from tests.bench_runs import assert_pictures, result_of, run_command


def test_a_training_is_a_plain_loop_with_a_larger_rate() -> None:
    """The task's own schedule at k times the learning rate, and mini-batches that go on over the end of an epoch."""
    task = build_task("mnist1d")
    settings = LargeBatches(task="mnist1d", batch_sizes=(100, 300), epochs=2)
    found = settings._train(task, 300, "linear scaling", seed=3)
    torch.manual_seed(3)
    module = task.build_module()
    optimizer = task.optimizer(module)
    for group in optimizer.param_groups:
        group["lr"] *= 3
    scheduler = MultiStepLR(optimizer, [15, 20])  # of 26 steps
    generator = torch.Generator().manual_seed(3)
    x, y = task.train_set.tensors  # type: ignore[attr-defined]
    order = torch.cat([torch.randperm(4000, generator=generator) for _ in range(2)])
    for step in range(26):
        samples = order[300 * step : 300 * (step + 1)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x[samples]), y[samples]).backward()
        optimizer.step()
        scheduler.step()
    inputs, labels = task.test_set.tensors  # type: ignore[attr-defined]
    module.eval()
    accuracy = 100 * (module(inputs).argmax(dim=1) == labels).float().mean().item()
    assert found == (26, pytest.approx(accuracy))


def test_rates_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    made = large_batches.LinearScalingLR

    class Recorded(made):  # type: ignore[misc, valid-type]
        def step(self) -> None:
            rates.append(self.optimizer.param_groups[0]["lr"] / 0.02)
            super().step()

    monkeypatch.setattr(large_batches, "LinearScalingLR", Recorded)
    task, settings = build_task("mnist1d"), LargeBatches(task="mnist1d", batch_sizes=(100, 400), epochs=1)
    seen = {}
    for rule in large_batches.RULES:
        settings._train(task, 400, rule, seed=0)
        seen[rule], rates = rates[1:5], []  # the first call is the scheduler's own, when it is made
    assert seen["unchanged"] == pytest.approx([1, 1, 1, 1])
    assert seen["linear scaling"] == pytest.approx([4, 4, 4, 4])
    assert seen["linear scaling, warm-up"] == pytest.approx([1, 2.5, 4, 4]), "two of ten steps"


def test_the_command(tmp_path: Path) -> None:
    result: dict[str, Any] = result_of(
        "large_batches", "--task mnist1d --batch_sizes 500 1000 4000 --epochs 1 --seeds 0 1", tmp_path
    )
    kinds = [(run["batch_size"], run["rule"], run["seed"]) for run in result["runs"]]
    assert len(kinds) == len(set(kinds)) == (1 + 2 * 3) * 2
    assert {run["batch_size"]: run["steps"] for run in result["runs"]} == {500: 8, 1000: 4, 4000: 1}
    text = (tmp_path / "large_batches.md").read_text()
    [of_first] = [line.split("|") for line in text.splitlines() if line.startswith("| 500 |")]
    assert len(set(of_first[3:6])) == 1, "all rules leave the first size as it is"
    assert_pictures(tmp_path, "large_batches")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task topics", "task='topics' has no accuracy: take digits, mnist1d or signals"),
        ("--batch_sizes 0", "batch_sizes must be one or more positive numbers"),
        ("--warmup_share 2", "warmup_share must be from 0 to 1, got 2"),
        ("--epochs 0", "epochs must be positive, got 0"),
    ],
)
def test_wrong_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("large_batches", options) != 0
    assert message in capsys.readouterr().err
