"""SelSync's averages under the next forward pass: the same weights, and modules that wait for their own only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import SelSyncStrategy
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.selsync import SelSync
from tests.harness import launch
from tests.lightning_models import Classifier, train_loader, trainer
from tests.models import OPTIMIZERS, batch, loss, seeded_mlp, state

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


def train(model: nn.Module, optimizer: str, **settings: Any) -> tuple[list[dict[str, Tensor]], int]:
    """Returns the state after every step, read at once from `state_dict`, and the number of synchronized steps."""
    own = OPTIMIZERS[optimizer](model)
    sync = SelSync(model, own, **settings)
    states = []
    for i in range(STEPS):
        own.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
        if i % 3 == 0:  # otherwise the next forward pass is what waits
            states.append(state(model))
    states.append(state(model))
    synchronized = sync.num_synchronized_steps
    sync.detach()
    return states, synchronized


SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"delta": 0.0},
    "selective": {"delta": 0.2, "smoothing": 0.3},
    "outer step": {"delta": 0.2, "smoothing": 0.3, "outer_momentum": 0.3},
    "int8": {"delta": 0.2, "smoothing": 0.3, "compression": "int8"},
}


def train_both(optimizer: str) -> dict[Any, Any]:
    return {
        (name, overlap, model.__name__): train(model(), optimizer, overlap=overlap, bucket_mb=1e-4, **settings)
        for name, settings in SETTINGS.items()
        for overlap in ("forward", "none")
        for model in (seeded_mlp, Skipping)
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_overlap_changes_no_bit(optimizer: str) -> None:
    """Also of layers that the next forward pass does not run, and of weights that are read in another module."""
    for outcomes in launch(train_both, 2, optimizer):
        for name in SETTINGS:
            for model in ("seeded_mlp", "Skipping"):
                hidden, waited = (outcomes[name, overlap, model] for overlap in ("forward", "none"))
                assert hidden[1] == waited[1] > 0
                for one, other in zip(hidden[0], waited[0], strict=True):
                    for key, value in other.items():
                        assert torch.equal(one[key], value), (name, model, key)


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
    for events in launch(order_of_events, 2):
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
    assert launch(fit, 2, tmp_path, init=False) == [3, 3]


def load_at_once() -> dict[str, Tensor]:
    model, other = seeded_mlp(), seeded_mlp(seed=7)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = SelSync(model, optimizer, delta=0.0, bucket_mb=1e-4, overlap="forward")
    loss(model, 0, dist.get_rank()).backward()
    sync.step()
    model.load_state_dict(other.state_dict())
    sync.synchronize()
    sync.detach()
    return state(model)


def test_loaded_weights_are_not_overwritten() -> None:
    for loaded in launch(load_at_once, 2):
        for name, value in seeded_mlp(seed=7).state_dict().items():
            assert torch.equal(loaded[name], value)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(seeded_mlp(), backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def train_compiled() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    compiled, _ = train(Compiled(), "sgd", delta=0.0, overlap="forward")
    plain, _ = train(seeded_mlp(), "sgd", delta=0.0)
    return compiled, plain


def test_the_graph_of_a_compiled_model_stays_whole() -> None:
    """A step waits for its average then."""
    for compiled, plain in launch(train_compiled, 2):
        for one, other in zip(compiled, plain, strict=True):
            for value, expected in zip(one.values(), other.values(), strict=True):
                assert torch.equal(value, expected)


def follow() -> list[bool]:
    """Returns after each step whether all averages have arrived."""
    model, average = seeded_mlp(), seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = SelSync(model, optimizer, delta=0.0, bucket_mb=1e-4, overlap="forward")
    sync.follow(average)
    arrived = []
    for i in range(3):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
        assert sync._overlap is not None
        arrived += [bucket._average is not None and bucket._average.done for bucket in sync._overlap.buckets]
    sync.detach()
    return arrived


def test_a_running_average_reads_averaged_weights() -> None:
    for arrived in launch(follow, 2):
        assert all(arrived)
        assert len(arrived) > 3
