"""Lines in trainings of two ranks that say what would be faster, and what their measurement leaves as it is."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_pipesync import PlanCallback
from lightning_pipesync.lab.plan import advice as advices
from lightning_pipesync.lab.plan import callback as plans
from lightning_pipesync.lab.plan.advice import Advice
from lightning_pipesync.training.registry import ADVISORS
from tests.quick.lab.test_advice import with_int4
from tests.support.case_table import Outcomes, launch_cases
from tests.support.lightning_models import Classifier, fit, train_loader, trainer

#: Whose averages are in flight between steps, or not; of 16 steps.
STRATEGIES: dict[str, dict[str, Any]] = {
    "dear": {"name": "dear", "overlap": "forward", "fusion": "buffer"},  # it measures the network by itself otherwise
    "codec": {"name": "dear", "compression": "int4", "fusion": "none"},
    "late": {"name": "pipe_sgd"},
    "local": {"name": "selsync", "delta": 0.1},
    "overlapped": {"name": "local_sgd", "period": 4, "fragments": 2, "overlap_steps": 2},
}
#: Which step is the last that is recorded.
STEPS = 7


def advised(folder: Path, strategy: dict[str, Any], **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Fits with an advisor that measures whatever a step takes; returns what was trained, and its lines."""
    lines: list[str] = []
    changes = {"STEPS": STEPS, "WARM_UP": 2, "LEAST_STEP_S": 0.0, **changes}
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(advices, name, value))
        stack.enter_context(mock.patch("lightning_pipesync.lightning.callback.rank_zero_info", lines.append))
        trained = fit(folder, strategy, {"optimizer": "adamw"}, max_epochs=2)
    return trained, [line for line in lines if line.startswith("The network takes")]


def with_and_without(folder: Path, strategy: dict[str, Any]) -> list[Any]:
    """Fits with an advisor, which measures in all cases, and without; what it finds is not said."""
    with (
        mock.patch.object(advices, "measure_latency", side_effect=advices.measure_latency) as measure,
        mock.patch.object(advices, "cluster_of", side_effect=advices.cluster_of) as cluster,
        mock.patch.object(advices, "advice", return_value=None),
    ):
        trained, lines = advised(folder, strategy, WORTH=-1.0)
    with mock.patch.object(advices.Advisor, "of", return_value=None):
        alone, _ = advised(folder, strategy)
    shown = [{name: value for name, value in one["metrics"].items() if "mib_sent" in name} for one in (trained, alone)]
    asked = cluster.call_args and cluster.call_args.args
    return [trained["weights"], alone["weights"], shown, measure.call_count, asked, lines]


def on_a_slow_network(folder: Path, again: int) -> list[str]:
    """Of a step of 2 s, also after the line, 1.9 s are waited, on a network that carries 100 bytes a second."""
    steps, advice = iter(range(100)), advices.advice

    def spent(_: Any) -> list[float]:
        step = next(steps)
        return [2.0 * step, 1.9 * step, 100 * step, step]

    def earlier(*asked: Any) -> Advice | None:
        found = advice(*asked)
        return found and replace(found, began=found.began - 2.0 * (16 - STEPS))

    with (
        mock.patch.object(advices.Advisor, "_spent", spent),
        mock.patch.object(advices, "advice", earlier),
        mock.patch.object(advices, "cluster_of", return_value=with_int4(100)),
        mock.patch.object(advices, "AGAIN", again),
    ):
        return advised(folder, {"name": "dear"}, WARM_UP=STEPS - 1)[1]


def in_ddp(folder: Path) -> tuple[Any, list[str]]:
    """Fits with a plan, and returns what was asked for advice, and what is printed besides the plan."""
    given = Advice("This {}.", 1.0, 0.6, 0.5, num_steps=-advices.AGAIN)
    with (
        mock.patch.object(plans, "advice", return_value=given) as advice,
        mock.patch.object(plans, "write_plan", return_value="plan"),
        mock.patch.object(advices, "perf_counter", return_value=given.began + advices.AGAIN),
        mock.patch("builtins.print") as said,
    ):
        plan = PlanCallback(folder, num_steps=3)
        trainer("ddp", 2, folder, callbacks=[plan], max_epochs=1).fit(Classifier("adamw"), train_loader())
    return advice.call_args and advice.call_args.args, [call.args[0] for call in said.call_args_list]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {name: partial(with_and_without, folder, how) for name, how in STRATEGIES.items()}
    cases |= {again: partial(on_a_slow_network, folder, again) for again in (9, 10)}
    return launch_cases({**cases, "ddp": partial(in_ddp, folder)}, 2)


def test_the_package_gives_each_training_an_advisor() -> None:
    assert len(ADVISORS) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_measurement_leaves_the_training_as_it_is(name: str, trained: Outcomes) -> None:
    """Whatever is in flight then; rank 0 alone asks what is faster than what was measured of this training."""
    first, second = trained[name]
    for weights, alone, (shown, without), measured, _, lines in (first, second):
        assert torch.equal(weights, alone)
        assert shown == without
        assert (measured, lines) == (1, [])
    assert second[4] is None
    world_size, sent, operations, busy, probes = first[4]
    assert world_size == 2
    assert sent > 0
    assert operations >= 0.25, "of local SGD one in four steps"
    assert busy > 0
    assert set(probes) == {"none", "int4", "int8"}


def test_the_line_is_said_on_rank_0_and_again_at_the_end_of_a_long_training(trained: Outcomes) -> None:
    line = r"The network takes 9\d% of a step. `DeARStrategy\(.*compression='int4'\)` would take \d.* measures it\."
    for again, times in ((9, 2), (10, 1)):
        first, second = trained[again]
        assert [bool(re.fullmatch(line, one)) for one in first] == [True] * times, first
        assert second == []


def test_a_plan_in_ddp_ends_with_the_line(trained: Outcomes) -> None:
    (asked, said), (other, nothing) = trained["ddp"]
    training, optimizer, pace, _, cluster, num_steps = asked
    assert training == ("ddp", "none", None)
    assert type(optimizer) is torch.optim.AdamW
    assert all(0 <= waited < seconds for seconds, waited in pace)
    assert (len(pace), cluster.world_size, num_steps) == (2, 2, 4)
    line = "The network takes 60% of a step. This would take 2 times fewer seconds."
    assert said[:2] == ["plan", line]
    assert len(said) == 3, "again at the end"
    assert (other, nothing) == (None, [])
