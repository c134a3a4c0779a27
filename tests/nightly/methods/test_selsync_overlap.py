"""SelSync's averages under the next forward pass: the same weights, and modules that wait for their own only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_pipesync import SelSync, SelSyncStrategy
from lightning_pipesync.methods.replicas.weights import Weights
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks
from tests.support.lightning_models import Classifier, train_loader, trainer
from tests.support.models import Run, assert_same, seeded_mlp, state

STEPS = 12


class Skipping(nn.Module):
    """A model that runs its second layer in every other step, and whose first weight its last layer uses, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        if self.calls % 2:
            x = torch.tanh(self.second(x))
        return self.last(nn.functional.linear(x, self.first.weight))


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()  # it compiles a function for some models only
        self.model = torch.compile(seeded_mlp(), backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": seeded_mlp, "skipping": Skipping, "compiled": Compiled}
#: By name: optimizer and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "delta 0": ("adamw", {"delta": 0.0}),
    "finite": ("sgd", {"delta": 0.2, "smoothing": 0.3}),
    "outer step": ("adamw", {"delta": 0.2, "smoothing": 0.3, "outer_momentum": 0.3}),
    "codec": ("sgd", {"delta": 0.2, "smoothing": 0.3, "compression": "int8"}),
    "codec and outer step": ("sgd", {"delta": 0.2, "smoothing": 0.3, "compression": "topk", "outer_momentum": 0.3}),
}


def train(model: str, case: str, overlap: str) -> tuple[list[dict[str, Tensor]], list[bool]]:
    """Returns the state after every step, read at once from `state_dict`, and which steps were synchronized."""
    optimizer, settings = CASES[case]
    run = Run(SelSync, optimizer, MODELS[model](), overlap=overlap, bucket_mb=1e-4, **settings)
    states, synchronized = [], []
    for i in range(STEPS):
        run.step(i)
        synchronized.append(run.sync.last.synchronized)
        if i % 3 == 0 or i == STEPS - 1:  # otherwise the next forward pass is what waits
            states.append(state(run.model))
    run.sync.detach()
    return states, synchronized


def test_overlap_changes_no_bit() -> None:
    """Also of layers that the next forward pass does not run, and of weights that are read in another module.

    After a synchronized step all ranks have the same weights, with a codec, too. A compiled model's graph stays whole,
    whose step waits for its average.
    """
    kinds = [*product(("mlp", "skipping"), CASES), ("compiled", "delta 0")]
    of_kinds = {(*kind, overlap): partial(train, *kind, overlap) for kind in kinds for overlap in ("forward", "none")}
    outcomes = launch_cases(of_kinds, 2)
    for model, case in kinds:
        hidden, waited = (outcomes[model, case, overlap] for overlap in ("forward", "none"))
        for (states, synchronized), (expected, of_waited), (of_first, _) in zip(
            hidden, waited, [hidden[0]] * 2, strict=True
        ):
            assert synchronized == of_waited
            assert sum(synchronized) > 1
            for i, (one, other, first) in enumerate(zip(states, expected, of_first, strict=True)):
                assert_same(one, other, (model, case, i))
                if synchronized[[0, 3, 6, 9, STEPS - 1][i]]:
                    assert_same(one, first, (model, case, i))


def follow() -> list[tuple[Tensor, Tensor]]:
    """Returns after each step the last layer's weight, as whoever averages the weights would read it, and later."""
    run = Run(SelSync, delta=0.0, bucket_mb=1e-4, overlap="forward")
    run.sync.follow(seeded_mlp())
    found = []
    for i in range(3):
        run.step(i)
        at_once = run.model[2].weight.detach().clone()
        run.sync.synchronize()
        found.append((at_once, run.model[2].weight.detach().clone()))
    run.sync.detach()
    return found


def test_who_follows_weights_waits_for_their_average() -> None:
    for found in on_ranks(follow, 2):
        assert all(torch.equal(at_once, later) for at_once, later in found)


class Announcing(Classifier):
    """Tells when its first layer runs after an update."""

    def __init__(self) -> None:
        super().__init__()
        self.first_has_run = threading.Event()
        self.model[0][0].register_forward_hook(lambda *_: self.first_has_run.set())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.first_has_run.clear()


def fit(directory: Path) -> int:
    """Holds back the last layer's average, in three steps, until the first layer has run; returns how often."""
    model = Announcing()
    finish, num_held_back = Weights.finish, 0

    def held_back(self: Weights, result: object = None) -> None:
        nonlocal num_held_back
        if num_held_back < 3 and any(tensor is model.model[2].weight for tensor in self.tensors):
            assert model.first_has_run.wait(60), "the step waits for its average"
            num_held_back += 1
        finish(self, result)

    strategy = SelSyncStrategy(delta=0.0, overlap="forward", bucket_mb=1e-4)
    with mock.patch.object(Weights, "finish", held_back):
        trainer(strategy, 2, directory, max_epochs=1, limit_train_batches=5).fit(model, train_loader())
    return num_held_back


def test_a_trainer_hides_averages_under_its_next_step(tmp_path: Path) -> None:
    """Its forward pass is within the call that steps."""
    assert on_ranks(fit, 2, tmp_path, init=False) == [3, 3]
