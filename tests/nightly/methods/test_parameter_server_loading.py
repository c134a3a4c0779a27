"""Parameter servers when something is loaded during training: servers read that, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync import ParameterServer
from tests.support.case_table import launch_cases
from tests.support.models import OPTIMIZERS, Run, seeded_mlp, state
from tests.support.server_runs import ServedRun, assert_weights

#: With one learner, so that timing plays no part.
LOCAL: dict[str, dict[str, Any]] = {
    "easgd": {"policy": "easgd", "period": 3},
    "downpour": {"policy": "downpour", "n_push": 2, "n_fetch": 3},
}
DEDICATED: dict[str, Any] = {"policy": "async", "servers": 1, "dedicated_servers": True}


class WithTarget(nn.Module):
    """A network with a copy of itself that no optimizer trains, as in DQN."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = seeded_mlp(), seeded_mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def load_target(settings: dict[str, Any], loads: bool) -> dict[str, Tensor]:
    model = WithTarget()
    run = Run(ParameterServer, lambda model: OPTIMIZERS["sgd"](model.net), model, timeout_s=60, **settings)
    for i in () if run.sync.only_serves else range(8):
        run.step(i)
        if loads:
            model.target.load_state_dict(model.net.state_dict())
    run.sync.flush()
    weights = state(model.net)
    run.sync.detach()
    return weights


def load_targets(settings: dict[str, Any], num_ranks: int) -> tuple[list[Any], list[Any]]:
    cases = {loads: partial(load_target, settings, loads) for loads in (True, False)}
    outcomes = launch_cases(cases, num_ranks)
    return outcomes[True], outcomes[False]


@pytest.mark.parametrize(("settings", "num_ranks"), [*((one, 1) for one in LOCAL.values()), (DEDICATED, 2)])
def test_servers_do_not_read_weights_when_a_target_network_is_loaded(settings: dict[str, Any], num_ranks: int) -> None:
    """A server that takes no steps, and loads nothing, is not asked to either."""
    with_target, without = load_targets(settings, num_ranks)
    assert_weights(with_target, without[0])


def set_rate(settings: dict[str, Any], loads: bool) -> dict[str, Tensor]:
    """Sets the learning rate in the sixth step, by loading a state of the optimizer alone, or after a flush."""
    run = Run(ParameterServer, lambda model: SGD(model.parameters(), lr=0.05), timeout_s=60, **settings)
    run.steps(range(5))
    run.backward(5)
    if loads:
        [group] = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": {}, "param_groups": [{**group, "lr": 0.02}]})
    else:
        run.optimizer.param_groups[0]["lr"] = 0.02
        run.sync.flush()
        run.sync.resume()
    run.sync.step()
    run.steps(range(6, 11))
    return run.end()


def test_servers_keep_their_weights_when_an_optimizer_alone_is_loaded() -> None:
    """Gradients that were accrued are applied first, as at a flush; EASGD's optimizers are the learners' own."""
    cases = {(name, loads): partial(set_rate, LOCAL[name], loads) for name in LOCAL for loads in (True, False)}
    outcomes = launch_cases(cases, 1)
    for name in LOCAL:
        assert_weights(outcomes[name, True], outcomes[name, False][0])


def train_again(optimizer: str, restarts: bool) -> dict[str, Tensor]:
    """Trains, and again from where it began, with the optimizer's first state: it has none."""
    run = ServedRun(optimizer, policy="sync")
    first = state(run.model), run.optimizer.state_dict()
    if restarts:
        run.steps(range(4))
        run.model.load_state_dict(first[0])
        run.optimizer.load_state_dict(first[1])
    run.steps(range(4))
    return run.end()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_optimizer_that_is_loaded_without_a_state_begins_anew(optimizer: str) -> None:
    outcomes = launch_cases({restarts: partial(train_again, optimizer, restarts) for restarts in (True, False)}, 2)
    assert_weights(outcomes[True], outcomes[False][0])


def load_weights_alone(optimizer: str, flushes: bool) -> dict[str, Tensor]:
    """Loads weights when the optimizer holds a copy of its state, as it does after it was given back to be saved."""
    run = ServedRun(optimizer, policy="sync")
    run.steps(range(2))
    if flushes:
        run.sync.flush()
        run.sync.return_optimizer_states()
    run.steps(range(2, 4))
    run.model.load_state_dict(seeded_mlp(1).state_dict())
    run.steps(range(4, 6))
    return run.end()


def test_weights_are_loaded_without_an_optimizers_state() -> None:
    outcomes = launch_cases({flushes: partial(load_weights_alone, "sgd", flushes) for flushes in (True, False)}, 2)
    assert_weights(outcomes[True], outcomes[False][0])
