"""`python -m benchmarks.staleness`: simulated learners, trainings by their logs, and that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adagrad

from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.served_trainings import Pass, ServedTrainings
from benchmarks.learners.simulated_learners import SimulatedLearners
from benchmarks.pipelines import layered
from benchmarks.pipelines.vectorized import Dense
from benchmarks.staleness import config_of
from lightning_pipesync.methods.servers.messages import Fetch, Update
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of, run_command
from tests.references.parameter_server import replay, replay_downpour

RANDOM = HostSpeeds(stalling=1.0, stall_s=1.0)
BOUND, RATE, LEARNERS = 1e-3, 0.1, 3


def updates_of(text: str, seed: int, number: int, learners: int = LEARNERS) -> list[Update]:
    simulated = SimulatedLearners(config_of(text), RANDOM.of_hosts(learners, seed))
    return [update for _, update in islice(simulated.updates(), number)]


def test_downpour_by_hand() -> None:
    """Two learners whose passes take 2 and 3; a push and a request every 2 steps, which are answered a step later."""
    config = config_of("downpour:n_push=2,n_fetch=2")
    found = islice(SimulatedLearners(config, [repeat(2.0), repeat(3.0)]).updates(), 4)
    times, updates = zip(*found, strict=True)
    assert times == (4.0, 6.0, 8.0, 12.0)
    pushed = [update.gradients[0] for update in updates]
    assert [(one.rank, one.step, one.version) for one in pushed] == [(0, 2, 0), (1, 2, 0), (0, 4, 1), (0, 6, 3)]
    fetches = [one.accrued.fetches for one in pushed if one.accrued]
    assert fetches == [(), (), (Fetch(3, 1, before_pass=False),), (Fetch(5, 3, before_pass=False),)]
    assert [update.staleness for update in updates] == [[0], [1], [1], [0]]


def batch_of(training: int, learner: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(training + 10 * learner + 1000 * number)
    return torch.randn(8, 6, generator=generator), torch.randint(10, (8,), generator=generator)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("async", "sgd"),
        ("k_batch_async:k=2,staleness_lr=gradient", "sgd"),
        ("k_sync:k=2", "sgd"),
        (f"k_async:k=2,staleness_lr=distance,distance_bound={BOUND}", "sgd"),
        ("downpour:n_push=3,n_fetch=3", "sgd"),
        ("downpour:n_push=3,n_fetch=3", "adagrad"),
        ("downpour:n_push=2,n_fetch=1", "sgd"),
    ],
)
def test_many_at_once_are_replays_of_their_logs(text: str, optimizer: str) -> None:
    """Of two trainings with other delays, weights and data."""
    num_updates, config = 12, config_of(text)
    make: Any = {"sgd": SGD, "adagrad": Adagrad}[optimizer]
    logs = [updates_of(text, seed, num_updates) for seed in (0, 1)]
    assert [update.gradients for update in logs[0]] != [update.gradients for update in logs[1]]
    models: list[nn.Module] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(layered.mlp(6, width=5, depth=2))

    def batches(passes: Sequence[Pass]) -> tuple[Tensor, Tensor]:
        x, y = zip(*(batch_of(training, *one) for training, one in enumerate(passes)), strict=True)
        return torch.stack(x), torch.stack(y)

    initial = torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])
    bound = BOUND if config.staleness_lr == "distance" else None
    trainings = ServedTrainings(Dense([6, 5, 10], [0, 0]), initial, logs, batches, partial(make, lr=RATE), bound)
    for number in range(num_updates):
        trainings.update(number)
    for training, (model, log) in enumerate(zip(models, logs, strict=True)):

        def loss(network: nn.Module, step: int, rank: int, training: int = training) -> Tensor:
            x, y = batch_of(training, rank, step + 1)
            return nn.functional.cross_entropy(network(x), y)

        def optimizer_of(network: nn.Module) -> Any:
            return make(network.parameters(), lr=RATE)

        if config.policy == "downpour":
            last = replay_downpour(model, optimizer_of, loss, log)[-1]
        else:
            last = replay(model, optimizer_of, loss, log, distance_bound=bound or 0.0)[-1]
        expected = parameters_to_vector(last.parameters()).detach()
        torch.testing.assert_close(trainings.weights[training], expected, rtol=1e-4, atol=1e-6)
        assert (expected - initial[training]).norm() > 0.01


@pytest.mark.parametrize(("n", "mean"), [(1, 1), (10, 10), (30, 29)])
def test_staleness_is_about_n(n: int, mean: float) -> None:
    """Lecture, "Staleness distribution": it is centered around n, but for what a learner's own updates take from it."""
    found = [late for update in updates_of(f"n_softsync:n={n}", 0, 3000, 30) for late in update.staleness]
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.06)


def test_the_command(tmp_path: Path) -> None:
    policies = "--policies sync async async:staleness_lr=distance --histograms async n_softsync:n=2"
    sizes = "--learners 4 --gradients 200 --passes 6 --evaluations 3 --batch_size 4 --hidden 4 --seeds 0 1 --target 95"
    result = result_of("staleness", f"{policies} {sizes} --n_push 1 2 8 --learning_rates 0.1 1e30", tmp_path)
    assert {share: [*found] for share, found in result["counts"].items()} == {
        share: ["async", "n_softsync:n=2"] for share in ("0.1", "1")
    }
    assert 200 <= sum(result["counts"]["1"]["async"]) <= 200 + 4
    kinds = [(run["learning_rate"], run["method"]) for run in result["policies"]]
    assert len(kinds) == len(set(kinds)) == 2 * 3
    for run in (*result["policies"], *result["downpour"]):
        assert run["times"] == [2.0, 4.0, 6.0]
        assert len(run["errors"]) == len(run["intervals"]) == 3
        assert run["diverged"] == (2 if run.get("learning_rate") == 1e30 else 0)
    assert [run["traffic"] for run in result["downpour"]] == [2.0, 1.0, 0.25] * 2
    assert [run["staleness"] for run in result["policies"] if run["method"] == "sync"] == [0, 0]
    text = (tmp_path / "staleness.md").read_text()
    assert "| async: staleness_lr=distance | 0.1 |" in text
    assert "(2 diverged)" in text
    assert_pictures(tmp_path, "staleness_counts", "staleness_errors", "staleness_downpour")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policies k_async:k=31", "k=31 of policy='k_async' is more than the 30 learners"),
        ("--policies asinc", "policy must be"),
        ("--policies async:staleness=mean", "staleness"),
        ("--policies easgd", "'easgd': the simulated learners push gradients"),
        ("--policies async:delay_compensation=momentum", "delay_compensation='momentum' in"),
        ("--random_shares 1.5", "random_shares must be from 0 to 1, got 1.5"),
        ("--optimizers adam", "optimizers: 'adam' is not known; there are sgd, adagrad"),
        ("--learning_rates 0", "learning_rates must be one or more positive numbers"),
    ],
)
def test_wrong_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("staleness", options) != 0
    assert message in capsys.readouterr().err
