"""Parameter servers when something is loaded during training: servers read that, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_pipesync import ParameterServer
from tests.case_table import launch_cases
from tests.models import OPTIMIZERS, Run, seeded_mlp, state
from tests.server_runs import assert_weights

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
