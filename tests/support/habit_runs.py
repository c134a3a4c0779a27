"""Habits in a plain loop with each method as synchronous SGD, or with gradients averaged by hand; what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.registry import METHODS
from tests.support.habits import HABITS, STEPS, Loop, layers
from tests.support.method_runs import SYNCHRONOUS
from tests.support.models import average_gradients

DEAR = {"dear", "dear, sharded", "dear, no overlap"}
SERVERS = {"parameter_server", "parameter_server, one"}
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
    "load in another memory format",
}
#: Documented: what is written through `p.data` is not seen, nor is who reads weights that have not arrived.
UNSEEN = {("write through data", method) for method in OVERLAPPED} | {
    ("follow with a target network", method) for method in OVERLAPPED
}
LOST = {("write through data", method) for method in SERVERS}
#: DDP averages once in each forward pass, and does not know another memory format.
OF_DDP = {"backward twice", "change the memory format", "load in another memory format"}


class MethodLoop(Loop):
    sync: SyncMethod | None = None
    averages = True

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.sync is None else self.sync.optimizer_state_dict(self.optimizer)

    def synchronize(self) -> None:
        if self.sync is not None:
            self.sync.synchronize()

    def reduce(self) -> None:
        self.sync.reduce() if self.sync is not None else average_gradients(self.model)

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
        made_by, settings = SYNCHRONOUS[method]
        loop.sync = METHODS[made_by](model, loop.optimizer, timeout_s=30, **settings)
    try:
        run_steps(loop, name, waits)
        if loop.sync is not None:
            loop.sync.flush()
        return [weight.detach().clone() for weight in loop.weights]
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        if loop.sync is not None:
            loop.sync.detach(timeout_s=1.0)


def run_steps(loop: Loop, name: str, waits: bool) -> None:
    """Trains with a habit; ``waits``: for weights and gradients that it uses."""
    habit = HABITS[name]
    for loop.number in range(STEPS):
        if loop.number and habit.after_step is not None:
            if waits:
                loop.synchronize()
            habit.after_step(loop)
        if habit.instead is not None:
            habit.instead(loop)
            continue
        loop.optimizer.zero_grad()
        loop.backward(loop.loss())
        if habit.after_backward is not None:
            if waits:
                loop.reduce()
            habit.after_backward(loop)
        loop.step()


def refusal(method: str, name: str, waits: bool) -> str:
    """Returns words of the error by which it is refused; empty: it is trained."""
    if method == "ddp":
        return ""
    if name == "replace the optimizer":
        return "SGD is not an optimizer that was passed to "
    if method in DEAR and name in OF_GRADIENTS:
        return "was written to after the backward pass"
    if method in DEAR | SERVERS and name in OF_STATES:
        return "optimizer.state has nothing of it"
    return "Call synchronize() before" if method in OVERLAPPED and name in UNAWAITED and not waits else ""


def assert_trained(of_ranks: Sequence[list[Tensor] | str], expected: Sequence[list[Tensor] | str], words: str) -> None:
    """Asserts that each rank has the expected weights, or, if there are ``words``, an error with them."""
    for weights, of_hand in zip(of_ranks, expected, strict=True):
        if words:
            assert isinstance(weights, str)
            assert words in weights
            continue
        assert not isinstance(weights, str), weights
        for one, other in zip(weights, of_hand, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
