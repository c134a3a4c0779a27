"""Habits between two steps with Accelerate and Fabric: trained on as in a plain loop, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import SGD

from lightning_pipesync import fabric as strategies
from tests.support.accelerate_runs import accelerator_of, end
from tests.support.case_table import Outcomes, launch_cases
from tests.support.habit_runs import LOST, OF_GRADIENTS, assert_trained, refusal, run_steps
from tests.support.habit_runs import train as train_in_plain_loop
from tests.support.habits import HABITS, Loop, layers
from tests.support.harness import on_ranks
from tests.support.method_runs import SYNCHRONOUS

STRATEGIES: dict[str, Any] = {
    "dear": strategies.DeARFabricStrategy,
    "selsync": strategies.SelSyncFabricStrategy,
    "local_sgd": strategies.LocalSGDFabricStrategy,
    "parameter_server": strategies.ParameterServerFabricStrategy,
    "pipe_sgd": strategies.PipeSGDFabricStrategy,
}


class FrameworkLoop(Loop):
    """A loop of an Accelerator or a Fabric, which prepares its model and optimizer by a call of ``prepare``."""

    def __init__(self, framework: Any, prepare: Callable[..., Any]) -> None:
        model = layers()
        prepared, optimizer = prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        super().__init__(model, optimizer)
        self.framework, self.forward = framework, prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.framework.backward(loss, **kwargs)


class AccelerateLoop(FrameworkLoop):
    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        accelerator = accelerator_of(method, **settings)
        super().__init__(accelerator, accelerator.prepare)

    def synchronize(self) -> None:
        self.framework.synchronize()

    def flush(self) -> None:
        self.framework.consolidate()

    def end(self) -> None:
        end(self.framework)


class FabricLoop(FrameworkLoop):
    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        strategy = STRATEGIES[method](**settings)
        fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
        fabric.launch()
        super().__init__(fabric, fabric.setup)

    def synchronize(self) -> None:
        self.framework.strategy.method_of().synchronize()

    def flush(self) -> None:
        self.framework.strategy.method_of().flush()

    def end(self) -> None:
        self.framework.strategy.teardown()


LOOPS: dict[str, Callable[..., AccelerateLoop | FabricLoop]] = {"accelerate": AccelerateLoop, "fabric": FabricLoop}


def train(framework: str, method: str, name: str) -> list[Tensor] | str:
    made_by, settings = SYNCHRONOUS[method]
    loop = LOOPS[framework](made_by, settings)
    try:
        run_steps(loop, name, waits=True)
        loop.flush()
        return [weight.detach().clone() for weight in loop.weights]
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        loop.end()


#: The frameworks take turns.
CASES = [
    (list(LOOPS)[(i + j) % 2], method, name) for i, method in enumerate(SYNCHRONOUS) for j, name in enumerate(HABITS)
]


@pytest.fixture(scope="module")
def expected() -> Outcomes:
    cases = {name: partial(train_in_plain_loop, "by hand", name, name not in OF_GRADIENTS) for name in HABITS}
    return launch_cases(cases, 2)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch_cases({case: partial(train, *case) for case in CASES}, 2, init=False, launch=on_ranks)


@pytest.mark.parametrize(("framework", "method", "name"), CASES)
def test_a_habit_is_trained_on_or_refused(
    framework: str, method: str, name: str, outcomes: Outcomes, expected: Outcomes
) -> None:
    if (name, method) not in LOST:
        assert_trained(outcomes[framework, method, name], expected[name], refusal(method, name, waits=True))
