"""`python -m benchmarks.converge`: emulated times, limits, and trainings in which each rank has its own pace."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.learners import host_speed_report, passes
from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.passes import Passes
from benchmarks.learners.throughput import gradients_per_second
from lightning_pipesync.lab.bench.converge import config_of, parse_method
from lightning_pipesync.lab.bench.tasks import build_task
from lightning_pipesync.methods.servers import ParameterServerConfig
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of
from tests.support.case_table import launch_cases

SLOW = HostSpeeds.parse("100ms", ["3:50%"], None)
STALLING = HostSpeeds.parse("100ms", [], "5%:10")


def test_a_slow_host_takes_longer() -> None:
    speeds = HostSpeeds.parse("0.1s", ["3:50%", "1:25%"], None)
    assert [next(speeds.seconds_of(host, 0)) for host in range(4)] == pytest.approx([0.1, 0.4, 0.1, 0.2])


def test_nothing_is_emulated_by_default() -> None:
    assert next(HostSpeeds.parse(None, [], None).seconds_of(0, 0)) == 0


def test_stalls_are_exponential_and_the_same_for_a_seed() -> None:
    def times(host: int, seed: int) -> list[float]:
        return list(islice(STALLING.seconds_of(host, seed), 20_000))

    first = times(0, 0)
    stalls = [seconds - 0.1 for seconds in first if seconds != 0.1]
    assert len(stalls) / len(first) == pytest.approx(0.05, rel=0.1)
    assert fmean(stalls) == pytest.approx(1.0, rel=0.1)
    assert fmean(stall**2 for stall in stalls) == pytest.approx(2.0, rel=0.2), "of an exponential distribution"
    assert times(0, 0) == first
    assert times(1, 0) != first
    assert times(0, 1) != first


class Clock:
    """A clock that only sleeping, and what a test says, moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(passes, "time", clock)
    return clock


def test_a_pass_takes_its_time_with_the_backward_pass_at_its_end(clock: Clock) -> None:
    weight, begun = torch.ones(1, requires_grad=True), []

    def backward(_: torch.Tensor) -> None:
        begun.append(clock.now)
        clock.now += 0.03

    def forward() -> torch.Tensor:
        clock.now += 0.02
        loss = (2 * weight).sum()
        loss.register_hook(backward)
        return loss

    emulated = Passes(iter([0.1, 0.1, 0.01]))
    assert emulated.run(forward) == 2
    assert (begun[-1], clock.now) == pytest.approx((0.1, 0.13)), "how long backward takes is not known yet"
    emulated.run(forward)
    assert (begun[-1], clock.now) == pytest.approx((0.13 + 0.07, 0.23))
    emulated.run(forward)
    assert clock.now == pytest.approx(0.23 + 0.05), "what takes longer by itself does not sleep"


def test_a_pass_ends_when_it_is_cancelled(clock: Clock) -> None:
    def check() -> None:
        if clock.now >= 0.04:
            raise TimeoutError

    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(TimeoutError):
        Passes(iter([0.1])).run(lambda: weight.sum(), check)
    assert clock.now == pytest.approx(0.04, abs=passes.SLICE_S)
    assert weight.grad is None


LIMITS: list[tuple[dict[str, Any], float]] = [
    ({"policy": "sync"}, 2 / 4),
    ({"policy": "k_sync", "k": 3}, 1 / 3),
    ({"policy": "k_batch_sync", "k": 3}, 1 / 3),
    ({"policy": "k_async"}, 2 / 4),
    ({"policy": "k_batch_async"}, 1 / 3.5),
    ({"policy": "async"}, 1 / 3.5),
    ({"policy": "n_softsync", "n": 2}, 1 / 3.5),
    ({"policy": "ssp", "staleness_bound": 2}, 2 / 4),
    ({"policy": "downpour", "n_push": 4, "n_fetch": 2}, 1 / 3.5),
    ({"policy": "easgd", "period": 8}, 1 / 3.5),
    ({"policy": "diloco", "period": 8}, 2 / 4),
    ({"policy": "diloco", "period": 8, "k": 1}, 1 / 3.5),
]


@pytest.mark.parametrize(("settings", "steps"), LIMITS)
def test_throughput_with_a_slow_host(settings: dict[str, Any], steps: float) -> None:
    """In units of a step at full speed, per gradient."""
    found = gradients_per_second(ParameterServerConfig(**settings), SLOW.of_hosts(4), 2000)
    assert found == pytest.approx(1 / (0.1 * steps), rel=0.01)


def test_throughput_with_stalls() -> None:
    """Asynchronous: hosts divided by the mean of a pass. Synchronous: by the mean of the longest one."""
    asynchronous, together = (
        gradients_per_second(ParameterServerConfig(policy=policy), STALLING.of_hosts(4)) for policy in ("async", "sync")
    )
    assert asynchronous == pytest.approx(4 / 0.15, rel=0.05)
    times = zip(*(STALLING.seconds_of(host, 7) for host in range(4)), strict=True)
    assert together == pytest.approx(4 / fmean(max(one) for one in islice(times, 20_000)), rel=0.05)


SERVED = [f"parameter_server:policy={policy}" for policy in ("sync", "async", "k_sync,k=1")]
METHODS = ["ddp", *SERVED, "selsync:delta=1"]


@pytest.mark.usefixtures("forked_ranks")
def test_the_command(tmp_path: Path) -> None:
    options = "--compute 20ms --slow 1:50% --stalls 10%:1 --steps 16 --evaluations 4 --target 20"
    result = result_of("converge", f"--methods {' '.join(METHODS)} {options}", tmp_path)
    runs = {run["method"]: run for run in result["runs"]}
    for run in runs.values():
        assert [point["steps"] for point in run["points"]] == [4, 8, 12, 16]
        for what in ("seconds", "mib"):
            values = [point[what] for point in run["points"]]
            assert values == sorted(values)
    ddp, sync, asynchronous, cancelling, _ = (runs[method] for method in METHODS)
    assert [point["quality"] for point in ddp["points"]] == [point["quality"] for point in sync["points"]]
    assert {point["spread"] for point in asynchronous["points"]} == {None}
    assert "staleness" not in sync
    assert sum(asynchronous["staleness_counts"]) == round(16 / 38 * 75), "a gradient for each batch"
    assert cancelling["staleness_counts"] == [sum(cancelling["staleness_counts"])], "none is stale"
    markdown = (tmp_path / "converge.md").read_text()
    assert "digits on 2 hosts, 20ms a step, host 1 at 50%, stalls 10%:1" in markdown
    assert_pictures(tmp_path, "converge", "errors_2", "staleness_2")


def an_epoch_at_own_pace(method: str) -> tuple[list[int], list[float], dict[str, float]]:
    """Returns the samples that this rank has trained on, by their order, and the learning rates of its steps."""
    torch.manual_seed(0)
    task = build_task("digits")
    training = parse_method(method)(task)
    assert training.own_pace
    speeds = HostSpeeds.parse("4ms", ["1:50%"], None)
    training.candidate.run_passes = Passes(speeds.seconds_of(dist.get_rank(), 0)).run
    rates, sizes, step = [], [], training.step

    def recorded(batch: Any) -> None:
        rates.append(training.candidate.optimizer.param_groups[0]["lr"])
        sizes.append(len(batch[1]))
        step(batch)

    training.step = recorded  # type: ignore[method-assign]
    parts = training.at_own_pace(seed=0, num_steps=training.steps_per_epoch, evaluations=3)
    weights = [float(module.state_dict()["0.weight"].sum()) for _, module in parts]
    metrics = training.candidate.sync.metrics()
    training.close()
    return sizes, rates, {**metrics, "last": weights[-1], "first": weights[0]}


def is_at_own_pace(method: str) -> list[bool]:
    tasks = (build_task("digits"), build_task("digits").with_label_skew(5))
    trainings = [parse_method(method)(task) for task in tasks]
    for training in trainings:
        training.close()
    return [training.own_pace for training in trainings]


def test_an_epoch_is_the_whole_data_set_and_rates_follow_it() -> None:
    """Ranks with data of their own take as many steps each."""
    scales = {"parameter_server:policy=async": 0.5, "parameter_server:policy=k_batch_sync,k=2": 1.0}
    cases = {method: partial(an_epoch_at_own_pace, method) for method in scales}
    outcomes = launch_cases({**cases, "own pace": partial(is_at_own_pace, "parameter_server:policy=async")}, 2)
    assert outcomes["own pace"] == [[True, False]] * 2
    for method, scale in scales.items():
        (sizes, rates, metrics), (other_sizes, other_rates, others) = outcomes[method]
        assert sum(sizes) + sum(other_sizes) == 1197
        for one in (rates, other_rates):
            assert one[0] == pytest.approx(0.05 * scale)
            assert one[-1] == pytest.approx(0.0005 * scale), "that of the end of the training, whoever trained more"
            assert one == sorted(one, reverse=True)
        assert (metrics["first"], metrics["last"]) == (others["first"], others["last"]), "all evaluate the same weights"
        assert metrics["first"] != metrics["last"]


def test_limits_in_the_report() -> None:
    result = {"settings": {"compute": "100ms", "slow": ["3:50%"], "stalls": None}, "world_size": 4}
    limits = {
        method: host_speed_report.limit_of(result, method, config_of(method))
        for method in ("ddp", "dear:bucket_mb=4", "local_sgd:period=8", "parameter_server:policy=async")
    }
    assert list(limits.values()) == [1.0, 1.0, None, pytest.approx(1.75, rel=0.01)]
