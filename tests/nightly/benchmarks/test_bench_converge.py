"""`pipesync bench converge`: the methods it trains with, its arithmetic, and that it runs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import benchmarks.tasks.mnist1d
import benchmarks.tasks.signals
import benchmarks.tasks.tiny_llama
import benchmarks.tasks.topics_muon  # noqa: F401 - they add themselves to the tasks
from lightning_pipesync.lab.bench import converge_report
from lightning_pipesync.lab.bench.converge import Converge, evaluate, parse_method, spread_of, train
from lightning_pipesync.lab.bench.tasks import TASKS, build_task
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks


@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_be_learned(name: str) -> None:
    """Some steps on one batch lower its loss."""
    torch.manual_seed(0)
    task = build_task(name)
    module = task.build_module()
    optimizer = task.optimizer(module)
    scheduler = task.scheduler(optimizer, 100)
    batch = torch.utils.data.default_collate([task.train_set[i] for i in range(task.batch_size)])
    losses: list[float] = []
    while len(losses) < 100 and (not losses or losses[-1] >= losses[0] / 2):
        optimizer.zero_grad()
        loss = task.loss(module, batch)
        loss.backward()
        losses.append(loss.item())
        if task.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), task.max_norm)
        optimizer.step()
        scheduler.step()
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", TASKS)
def test_validation_holds_back_a_tenth_of_the_training_data(name: str) -> None:
    task, whole, again = build_task(name, "validation"), build_task(name), build_task(name, "validation")
    kept, held_back = task.train_set.indices, task.test_set.indices
    assert sorted(kept + held_back) == list(range(len(whole.train_set))), "each sample once, none of the test set"
    assert len(held_back) == round(len(whole.train_set) / 10)
    assert again.test_set.indices == held_back, "always the same"
    assert all(torch.equal(task.test_set[i][0], whole.train_set[index][0]) for i, index in enumerate(held_back))
    if task.labels is not None:
        assert task.labels.tolist() == [label.item() for _, label in task.train_set]


def test_score_of_topics_is_the_loss() -> None:
    task = build_task("topics")
    torch.manual_seed(0)
    module, batch = task.build_module(), [torch.stack([task.test_set[i][0] for i in range(3)])]
    total, number = task.score(module, batch)
    assert number == 3 * 64
    assert total.item() / number == pytest.approx(task.loss(module, batch).item())
    assert task.quality(math.log(7)) == pytest.approx(7)
    assert {task.quality(diverged) for diverged in (1000.0, math.inf, math.nan)} == {1e6}, "no error, and no infinity"


def quality_of_the_largest() -> float:
    task = build_task("digits")
    module = torch.nn.Flatten()  # of 64 values the largest is the answer
    quality = evaluate(task, module)
    images, labels = map(torch.stack, zip(*task.test_set, strict=True))
    assert quality == pytest.approx(100 * (images.flatten(1).argmax(dim=1) == labels).float().mean().item())
    assert module.training
    return quality


def spread() -> float:
    own = torch.tensor([3.0, 4.0]) + torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])[dist.get_rank()]
    return spread_of(own, torch.tensor([3.0, 4.0]))


def test_all_ranks_evaluate_together() -> None:
    outcomes = launch_cases({"quality": quality_of_the_largest, "spread": spread}, 3)
    assert len(set(outcomes["quality"])) == 1
    assert outcomes["spread"] == pytest.approx([(2 / 3) ** 0.5 / 5] * 3), "distances of 1, 1 and 0 from a norm of 5"


def one_training(method: str) -> dict[str, Any]:
    settings = Converge(methods=(method,), epochs=1, evaluations=2)
    progress: list[str] = []
    result = train(build_task("digits"), method, 0, settings, progress.append)
    assert len(progress) == 2
    return result


def test_methods_without_delay_train_as_ddp_does() -> None:
    methods = ["ddp", "selsync:delta=0,aggregation=gradients,partition=defdp", "pipe_sgd:staleness=0"]
    outcomes = launch_cases({method: partial(one_training, method) for method in methods}, 2)
    ddp, selsync, pipe_sgd = (outcomes[method][0]["points"] for method in methods)
    assert [point["steps"] for point in ddp] == [19, 38]
    for other in (selsync, pipe_sgd):
        assert [point["quality"] for point in ddp] == [point["quality"] for point in other]
    assert [point["spread"] for point in ddp + selsync] == [0] * 4
    assert selsync[0]["mib"] == pytest.approx(ddp[0]["mib"], rel=0.01)


SKEWED = [
    "ddp",
    "local_sgd:period=0.5epoch",
    "selsync:delta=1,partition=defdp",
    "selsync:delta=1,partition=defdp,injection=1:0.5",
]


def label_skewed() -> dict[str, tuple[list[torch.Tensor], int]]:
    """Returns the labels of two batches, and the steps of a training of one epoch, by method."""
    task = build_task("digits").with_label_skew(5)
    settings = Converge(methods=tuple(SKEWED), epochs=1, evaluations=1, labels_per_worker=5)
    outcomes = {}
    for method in SKEWED:
        training = parse_method(method)(task)
        batches = training.loader(0)
        labels = [batch[1] for batch, _ in zip(batches, range(2), strict=False)]
        training.close()
        outcomes[method] = labels, train(task, method, 0, settings, lambda text: None)["points"][-1]["steps"]
    return outcomes


def test_label_skew_and_injection() -> None:
    """Each of two ranks holds five labels; injection adds the other's, and the number of steps stays."""
    outcomes = on_ranks(label_skewed, 2)
    for rank, outcome in enumerate(outcomes):
        own = set(range(5 * rank, 5 * rank + 5))
        assert len({steps for _, steps in outcome.values()}) == 1
        for method in SKEWED[:-1]:
            assert all(set(labels.tolist()) <= own and len(labels) == 16 for labels in outcome[method][0])
        other = outcomes[1 - rank][SKEWED[-1]][0]
        for labels, others in zip(outcome[SKEWED[-1]][0], other, strict=True):
            assert len(labels) == 8 + 4, "Eq. 3 leaves 8 of 16, half of which the other one gets"
            assert set(labels[:8].tolist()) <= own
            assert labels[8:].tolist() == others[:4].tolist()


def with_clipping(method: str) -> tuple[list[torch.Tensor], float]:
    """Returns the weights after 3 steps on unlike batches, clipped, and MiB."""
    torch.manual_seed(0 if method == "ddp" else dist.get_rank())  # rank 0's weights must win
    training = parse_method(method)(replace(build_task("digits"), max_norm=0.1))
    training.module.eval()  # no dropout
    for step in range(3):
        images = torch.full((4, 1, 8, 8), 0.1 * step + 0.3 * dist.get_rank())
        training.step([images, torch.arange(4)])
    with training.consolidated():  # whatever is under way has been counted then
        pass
    outcome = [parameter.detach().clone() for parameter in training.module.parameters()], training.mib_sent
    training.close()
    return outcome


def test_a_synchronous_parameter_server_trains_as_ddp_does() -> None:
    methods = ["parameter_server:policy=sync,servers=1", "ddp"]
    found = launch_cases({method: partial(with_clipping, method) for method in methods}, 3)
    outcomes, ddp = found[methods[0]], found["ddp"][0][0]
    for weights, _ in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(weights, outcomes[0][0], strict=True))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(outcomes[0][0], ddp, strict=True))
    size = sum(part.numel() for part in ddp) * 4 / 2**20
    assert outcomes[1][1] == pytest.approx(3 * size, rel=0.01), "a gradient a step"
    assert outcomes[0][1] == pytest.approx((2 * 3 + 1) * size, rel=0.01), "the weights, to the two others, and at first"


def test_methods_are_parsed() -> None:
    methods = [
        "alone",
        "ddp",
        "dear:compression=bf16",
        "local_sgd:period=4,outer_optimizer=nesterov",
        "local_sgd:period=0.25epoch,participation=0.5",
        "pipe_sgd:delay_compensation=none,bucket_mb=none",
        "pipe_sgd:compression=int8,error_feedback=true",
        "parameter_server:policy=ssp,staleness_bound=100,servers=1",
        "selsync:delta=0.3,partition=defdp",
    ]
    assert all(map(parse_method, methods))


def saved(points: dict[str, list[list[float]]], higher_is_better: bool, target: float) -> dict[str, Any]:
    """Two evaluations, after 10 and 20 steps; one training for each list of qualities."""

    def point(method: str, i: int, quality: float) -> dict[str, float]:
        seconds = (i + 1) * (2.0 if method == "ddp" else 1.0)
        sent = {"mib": 5.0, "consolidation_mib": 0.5 * i}
        return {"steps": 10 * (i + 1), "seconds": seconds, "quality": quality, "spread": 0.01 * (i + 1), **sent}

    runs = [
        {"method": method, "seed": seed, "lssr": 0.5, "points": [point(method, i, q) for i, q in enumerate(qualities)]}
        for method, seeds in points.items()
        for seed, qualities in enumerate(seeds)
    ]
    settings = {"task": "digits", "seeds": [0, 1], "evaluations": 2, "labels_per_worker": 5}
    shared = {"higher_is_better": higher_is_better, "target": target, "world_size": 2}
    return {"settings": settings, "metric": "test accuracy %", "runs": runs, **shared}


def test_rows_of_the_table() -> None:
    qualities = {
        "quick:x=1": [[99.0, 98.0], [99.0, 99.5]],
        "ddp": [[90.0, 98.5], [98.0, 98.5]],
        "lucky": [[99, 1], [1, 2]],
        "alone": [[1, 2], [1, 2]],
    }
    result = saved(qualities, True, 98.5)
    quick, ddp, lucky = converge_report.rows_of(result)
    assert (quick.steps, quick.seconds, quick.num_reached, quick.speedup) == (10, 1.0, 2, 4.0)
    assert (quick.best, quick.difference, quick.final, quick.spread) == (99.25, 0.75, 98.75, 0.015)
    assert quick.difference_interval == pytest.approx(12.706 * 0.25, rel=1e-4), "of 99 - 98.5 and 99.5 - 98.5"
    assert quick.best_interval == pytest.approx(12.706 * 0.25, rel=1e-4), "Student's t with one degree of freedom"
    assert (ddp.steps, ddp.seconds, ddp.speedup, ddp.difference) == (20, 4.0, 1.0, 0.0)
    assert (lucky.num_reached, lucky.steps, lucky.speedup, lucky.share_of_limit) == (1, None, None, None)
    assert (quick.share_of_limit, ddp.share_of_limit) == (2.0, 0.5), "DDP's 20 steps of 0.1 s"
    text = converge_report.as_markdown([result])
    quality = "99.25 ± 3.18 | +0.75 ± 3.18 | 98.75 ± 9.53 | 1.50%"
    assert f"| quick: x=1 | 10 | 0.500 | {quality} | 2 of 2 | 5.0 | 100 | 1.0 | 4.00 | 200% |" in text
    assert "at least 98.5" in text
    assert "up to 0.5 MiB each time" in text
    assert "digits on 2 hosts, 5 labels on each" in text


def test_a_lower_perplexity_is_better() -> None:
    result = saved({"ddp": [[7.0, 5.0], [7.0, 5.0]], "worse": [[6.0, 5.5], [6.0, 5.5]]}, False, 6.0)
    ddp, worse = converge_report.rows_of(result)
    assert (ddp.steps, ddp.best) == (20, 5.0)
    assert (worse.steps, worse.best, worse.difference) == (10, 5.5, -0.5)
    assert "at most 6" in converge_report.as_markdown([result])


@pytest.mark.usefixtures("forked_ranks")
def test_the_command(tmp_path: Path) -> None:
    methods = ["ddp", "selsync:delta=0.3,smoothing=0.16"]
    options = "--seeds 0 1 --epochs 1 --evaluations 3 --target 50 --evaluate_on validation --steps 20"
    result = result_of("bench converge", f"--methods {' '.join(methods)} {options}", tmp_path)
    assert [(run["method"], run["seed"]) for run in result["runs"]] == [(m, s) for s in (0, 1) for m in methods]
    assert result["metric"] == "validation accuracy %"
    for run in result["runs"]:
        for what in ("steps", "seconds", "mib"):
            values = [point[what] for point in run["points"]]
            assert len(values) == 3
            assert what != "steps" or values[-1] == 20
            assert values == sorted(values)
        of_all = sum(point["consolidation_mib"] for point in run["points"])
        assert (of_all == 0) == run["method"].startswith("ddp"), "replicas are averaged for a measurement"
    assert "selsync: delta=0.3, smoothing=0.16" in (tmp_path / "converge.md").read_text()
    assert_pictures(tmp_path, "converge")
