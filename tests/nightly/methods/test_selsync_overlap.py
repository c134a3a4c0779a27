"""SelSync's averages under the next forward pass: the same weights, and modules that wait for their own only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import SelSyncStrategy
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.selsync import SelSync
from tests.support.harness import on_ranks
from tests.support.lightning_models import Classifier, train_loader, trainer
from tests.support.models import OPTIMIZERS, Run, assert_same, batch, loss, seeded_mlp, state

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


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": seeded_mlp, "skipping": Skipping}


def train(model: str, optimizer: str, **settings: Any) -> tuple[list[dict[str, Tensor]], int]:
    """Returns the state after every step, read at once from `state_dict`, and the number of synchronized steps."""
    run = Run(SelSync, optimizer, MODELS[model](), **settings)
    states = []
    for i in range(STEPS):
        run.step(i)
        if i % 3 == 0:  # otherwise the next forward pass is what waits
            states.append(state(run.model))
    states.append(state(run.model))
    run.sync.detach()
    return states, run.sync.num_synchronized_steps


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["mlp", "skipping"])
@pytest.mark.parametrize(
    "settings",
    [
        {"delta": 0.0},
        {"delta": 0.2, "smoothing": 0.3},
        {"delta": 0.2, "smoothing": 0.3, "outer_momentum": 0.3},
        {"delta": 0.2, "smoothing": 0.3, "compression": "int8"},
    ],
    ids=str,
)
def test_overlap_changes_no_bit(settings: dict[str, Any], model: str, optimizer: str) -> None:
    """Also of layers that the next forward pass does not run, and of weights that are read in another module."""
    hidden, waited = (
        on_ranks(partial(train, overlap=overlap, bucket_mb=1e-4, **settings), 2, model, optimizer)
        for overlap in ("forward", "none")
    )
    for (states, synchronized), (expected, as_often) in zip(hidden, waited, strict=True):
        assert synchronized == as_often > 0
        for one, other in zip(states, expected, strict=True):
            assert_same(one, other)


def order_of_events() -> list[str]:
    """Takes a step, and a forward pass under which the last layer's average is held back until the first has run."""
    model = seeded_mlp()
    assert isinstance(model, nn.Sequential)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = SelSync(model, optimizer, delta=0.0, bucket_mb=1e-4, overlap="forward")
    loss(model, 0, dist.get_rank()).backward()
    events: list[str] = []
    first_has_run = threading.Event()
    [replicas] = [one.replicas for one in sync._units]
    finish = ReplicatedTensors.finish

    def held_back(self: ReplicatedTensors, index: int, result: object = None) -> None:
        if any(tensor is model[2].weight for tensor in self.tensors[index]):
            assert first_has_run.wait(60), "the first layer waits for the last one's average"
        finish(self, index, result)
        events.extend(name for name, p in model.named_parameters() if any(p is t for t in self.tensors[index]))

    replicas.finish = held_back.__get__(replicas)  # type: ignore[method-assign]
    sync.step()
    events.append("step")
    for index, name in ((0, "first layer"), (2, "last layer")):
        model[index].register_forward_hook(lambda *_, name=name: events.append(name))
    model[0].register_forward_hook(lambda *_: first_has_run.set())
    model(batch(1, dist.get_rank())[0])
    sync.detach()
    return [event for event in events if event in ("step", "0.weight", "first layer", "2.weight", "last layer")]


def test_a_module_waits_for_its_own_weights_only() -> None:
    for events in on_ranks(order_of_events, 2):
        assert events.index("0.weight") < events.index("first layer") < events.index("2.weight")
        assert events.index("step") < events.index("2.weight") < events.index("last layer")


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
    finish, num_held_back = ReplicatedTensors.finish, 0

    def held_back(self: ReplicatedTensors, index: int, result: object = None) -> None:
        nonlocal num_held_back
        if num_held_back < 3 and any(tensor is model.model[2].weight for tensor in self.tensors[index]):
            assert model.first_has_run.wait(60), "the step waits for its average"
            num_held_back += 1
        finish(self, index, result)

    ReplicatedTensors.finish = held_back  # type: ignore[method-assign]
    strategy = SelSyncStrategy(delta=0.0, overlap="forward", bucket_mb=1e-4)
    trainer(strategy, 2, directory, max_epochs=1).fit(model, train_loader())
    return num_held_back


def test_a_trainer_hides_averages_under_its_next_step(tmp_path: Path) -> None:
    """Its forward pass is within the call that steps."""
    assert on_ranks(fit, 2, tmp_path, init=False) == [3, 3]


def load_at_once() -> dict[str, Tensor]:
    run = Run(SelSync, delta=0.0, bucket_mb=1e-4, overlap="forward")
    run.step(0)
    run.model.load_state_dict(seeded_mlp(seed=7).state_dict())
    run.sync.synchronize()
    run.sync.detach()
    return state(run.model)


def test_loaded_weights_are_not_overwritten() -> None:
    for loaded in on_ranks(load_at_once, 2):
        assert_same(loaded, seeded_mlp(seed=7).state_dict())


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()  # it compiles a function for some models only
        self.model = torch.compile(seeded_mlp(), backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


MODELS["compiled"] = Compiled


def test_the_graph_of_a_compiled_model_stays_whole() -> None:
    """A step waits for its average then."""
    compiled = on_ranks(partial(train, delta=0.0, overlap="forward"), 2, "compiled", "sgd")
    plain = on_ranks(partial(train, delta=0.0), 2, "mlp", "sgd")
    for (states, _), (expected, _) in zip(compiled, plain, strict=True):
        for one, other in zip(states, expected, strict=True):
            assert_same(dict(zip(other, one.values(), strict=True)), other)


def follow() -> list[bool]:
    """Returns after each step whether all averages have arrived."""
    run = Run(SelSync, delta=0.0, bucket_mb=1e-4, overlap="forward")
    run.sync.follow(seeded_mlp())
    arrived = []
    for i in range(3):
        run.step(i)
        arrived += [bucket._average is not None and bucket._average.done for bucket in run.sync._overlap.buckets]
    run.sync.detach()
    return arrived


def test_a_running_average_reads_averaged_weights() -> None:
    for arrived in on_ranks(follow, 2):
        assert all(arrived)
        assert len(arrived) > 3
