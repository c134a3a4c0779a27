"""What people do between two steps: each method trains as gradients averaged by hand do, or refuses it by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from lightning_pipesync.methods.sync_method import SyncMethod
from tests.support.case_table import Outcomes, launch_cases
from tests.support.habits import HABITS, STEPS, Loop, layers
from tests.support.models import average_gradients

#: Settings with which a method is synchronous SGD.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dear": (DeAR, {"fusion": "buffer", "bucket_mb": 1e-3}),
    "dear, sharded": (DeAR, {"update": "sharded", "fusion": "buffer", "bucket_mb": 1e-3}),
    "dear, no overlap": (DeAR, {"overlap": "none"}),
    "selsync": (SelSync, {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"}),
    "selsync, weights": (SelSync, {"delta": 0.0, "partition": "defdp"}),
    "selsync, overlapped": (SelSync, {"delta": 0.0, "overlap": "forward", "partition": "defdp", "bucket_mb": 1e-3}),
    "local_sgd": (LocalSGD, {"period": 1, "lr_scale": 1.0}),
    "parameter_server": (ParameterServer, {"policy": "sync"}),
    "pipe_sgd": (PipeSGD, {"staleness": 0}),
}
DEAR = {"dear", "dear, sharded", "dear, no overlap"}
#: Weights may arrive under the next forward pass.
OVERLAPPED = {"dear", "dear, sharded", "selsync, overlapped"}
#: The gradient is averaged in `reduce`, and what is written then is of the average; others have this rank's.
AVERAGES = {"selsync", "pipe_sgd"}

OF_GRADIENTS = {name for name, habit in HABITS.items() if habit.after_backward is not None}
OF_STATES = {"clear the state", "reset a moment", "log moments"}
#: What is written to weights where nobody has waited for them, and no hook does.
UNAWAITED = {
    "clamp weights",
    "bound norms of rows",
    "add noise",
    "initialize a layer anew",
    "rebind data",
    "rebind data to a vector",
    "go back halfway",
    "mask weights",
    "prune, and make it permanent",
    "swap weights and back",
    "read weights in a thread",
    "copy the model",
    "change the memory format",
}
#: Documented: what is written through `p.data` is not seen, nor is who reads weights that have not arrived.
UNSEEN = {("write through data", method) for method in OVERLAPPED} | {
    ("follow with a target network", method) for method in OVERLAPPED
}
LOST = {("write through data", "parameter_server")}
#: DDP averages once in each forward pass, and does not know another memory format.
OF_DDP = {"backward twice", "change the memory format"}


class MethodLoop(Loop):
    sync: SyncMethod | None = None
    averages = True

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.sync is None else self.sync.optimizer_state_dict(self.optimizer)

    def step(self) -> None:
        if self.sync is not None:
            return self.sync.step(optimizer=self.optimizer)
        if self.averages:
            average_gradients(self.model)
        self.optimizer.step()


def train(method: str, name: str, waits: bool) -> list[Tensor] | str:
    """Trains; with ``waits`` as the pages say: after `synchronize`, and with `reduce` before gradients are used."""
    model = layers()
    loop = MethodLoop(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    if method == "ddp":
        loop.averages, loop.forward = False, DistributedDataParallel(model, find_unused_parameters="freeze" in name)
    elif method != "by hand":
        make, settings = METHODS[method]
        loop.sync = make(model, loop.optimizer, timeout_s=30, **settings)
    try:
        for loop.number in range(STEPS):
            run_step(loop, name, waits)
        if loop.sync is not None:
            loop.sync.flush()
        return [weight.detach().clone() for weight in loop.weights]
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        if loop.sync is not None:
            loop.sync.detach(timeout_s=1.0)


def run_step(loop: MethodLoop, name: str, waits: bool) -> None:
    habit = HABITS[name]
    if loop.number and habit.after_step is not None:
        if waits and loop.sync is not None:
            loop.sync.synchronize()
        habit.after_step(loop)
    if habit.instead is not None:
        return habit.instead(loop)
    loop.optimizer.zero_grad()
    loop.loss().backward()
    if habit.after_backward is not None:
        if waits:
            loop.sync.reduce() if loop.sync is not None else average_gradients(loop.model)
        habit.after_backward(loop)
    loop.step()
    return None


def refusal(method: str, name: str, waits: bool) -> str:
    """Returns words of the error by which it is refused; empty: it is trained."""
    if name == "replace the optimizer":
        return "SGD is not an optimizer that was passed to "
    if method in DEAR and name in OF_GRADIENTS:
        return "was written to after the backward pass"
    if method in DEAR | {"parameter_server"} and name in OF_STATES:
        return "optimizer.state has nothing of it"
    return "Call synchronize() before" if method in OVERLAPPED and name in UNAWAITED and not waits else ""


CASES = [(method, name, waits) for method in METHODS for name in HABITS for waits in (False, True)]
CASES += [("ddp", name, False) for name in HABITS]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases = [*CASES, *(("by hand", name, waits) for name in HABITS for waits in (True, False))]
    return launch_cases({case: partial(train, *case) for case in cases}, 2)


@pytest.mark.parametrize("method", ["ddp", *METHODS])
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_is_trained_on_or_refused(name: str, method: str, outcomes: Outcomes) -> None:
    for waits in (False, True) if method in METHODS else (False,):
        if (name, method) in LOST or ((name, method) in UNSEEN and not waits) or (method == "ddp" and name in OF_DDP):
            continue
        # Other methods use a gradient that is written to on each rank.
        of_average = waits and (name not in OF_GRADIENTS or method in AVERAGES)
        of_average |= method == "ddp" and name in OF_GRADIENTS
        words = refusal(method, name, waits) if method in METHODS else ""
        expected = outcomes["by hand", name, of_average]
        for weights, of_hand in zip(outcomes[method, name, waits], expected, strict=True):
            if words:
                assert isinstance(weights, str)
                assert words in weights
                continue
            assert not isinstance(weights, str), weights
            for one, other in zip(weights, of_hand, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
