"""The training loop, the same on a rank and in the reference, and what may happen between two steps.

To add an event, write a function of a worker and a step and give it a line in `EVENTS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.fuzz.layers import Frozen, Model, StopOnPurpose
from tests.fuzz.optimizers import SCHEDULERS, optimizers_of
from tests.fuzz.sharding import copied, whole
from tests.support.habits import HABITS, ONCE, Loop
from tests.support.models import batch

if TYPE_CHECKING:
    from tests.fuzz.configuration import Configuration

STEPS = 6
MAX_NORM, MAX_VALUE = 0.3, 0.01

#: What is compared: tensors and plain values, by name.
Seen = dict[str, Any]


class Replica:
    """What a rank's user has: model, optimizers, schedulers, and a loss scaler.

    Args:
        mesh: on which the model is sharded; None: it is whole.

    Attributes:
        initial: the weights in the beginning, for an event that loads them again.
    """

    def __init__(self, configuration: Configuration, rank: int, mesh: DeviceMesh | None = None) -> None:
        self.configuration, self.rank, self.mesh = configuration, rank, mesh
        torch.manual_seed(configuration.seed)
        self.model = Model(configuration.layers)
        if configuration.double:
            self.model.double()
        if mesh is not None and configuration.sharding is not None:
            configuration.sharding.shard(self.model, mesh)
        self.initial = copied(self.model.state_dict())
        self.optimizers: list[Optimizer] = optimizers_of(
            self.model,
            list(self.model.blocks),
            configuration.optimizer,
            configuration.options,
            configuration.num_groups,
            configuration.num_optimizers,
        )
        name = configuration.scheduler
        self.schedulers: list[Any] = [SCHEDULERS[name](optimizer) for optimizer in self.optimizers] if name else []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if configuration.scaler else None

    def pretrain(self) -> None:
        """Takes steps on one batch for all ranks, so that the optimizers have a state."""
        for step in range(self.configuration.pretrained_steps):
            self.zero_grad()
            self.loss(step, 0, rank=0).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        self.zero_grad()

    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        torch.default_generator.manual_seed(1_000 * step + 10 * micro + rank)  # of dropout
        x, y = batch(8 * step + micro, rank)
        self.model.replica = self.configuration.place_of(rank)[0]
        return nn.functional.cross_entropy(self.forward(x, step), y)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = x.double() if self.configuration.double else x
        sharding = self.configuration.sharding
        if sharding is None:
            return self.model(x, step)
        self._freeze_and_thaw(step)
        if self.mesh is not None or sharding.param_dtype is None:
            return self.model(x, step)
        weights = {name: p.to(sharding.param_dtype) for name, p in self.model.named_parameters()}
        output: Tensor = functional_call(self.model, weights, (x.to(sharding.param_dtype), step))
        return output.to(sharding.output_dtype or output.dtype)

    def _freeze_and_thaw(self, step: int) -> None:
        """Changes what has a gradient before a forward pass, where FSDP2 still sees it."""
        changing = [block for block in self.model.blocks if isinstance(block, Frozen)]
        for module in self.model.modules() if changing else ():
            if isinstance(module, FSDPModule):
                module.reshard()
        for block in changing:
            block.change(step)

    def backward(self, step: int, micro: int) -> None:
        configuration = self.configuration
        loss = self.loss(step, micro, self.rank) / configuration.accumulate
        if configuration.overflow == (step, self.rank):
            loss = loss * float("inf")
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self, optimizer: Optimizer) -> None:
        """Clips what the optimizer is about to apply, in PyTorch's own words."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.configuration.clip == "norm":
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        elif self.configuration.clip == "value":
            nn.utils.clip_grad_value_(parameters, MAX_VALUE)

    def forget_unscaling(self) -> None:
        """Has the scaler forget a step that is skipped; its ``update`` is for one that is taken."""
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()

    def recover(self) -> None:
        """Has FSDP2 forget a pass that was stopped."""
        if isinstance(self.model, FSDPModule):
            self.model.reset_iter_state()

    def zero_grad(self) -> None:
        for one in self.optimizers if self.configuration.zero_optimizers else [self.model]:
            one.zero_grad(self.configuration.set_to_none)

    def end_step(self) -> None:
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()

    def states(self) -> list[dict[str, Any]]:
        """Returns the states of the optimizers and of the loss scaler."""
        return [one.state_dict() for one in (*self.optimizers, self.scaler) if one is not None]

    def load_states(self, states: list[dict[str, Any]]) -> None:
        """Loads what :meth:`states` returned."""
        for one, state in zip((*self.optimizers, self.scaler), states, strict=False):
            if one is not None:
                one.load_state_dict(state)

    @torch.no_grad()
    def output(self, step: int) -> Tensor:
        self.model.eval()
        self.model.replica = 0
        output = self.forward(batch(step, 7)[0], step)
        self.model.train()
        return output

    def weights(self) -> Seen:
        return copied(whole(self.model.state_dict()))


class Worker(ABC):
    """One rank, or the reference of all ranks.

    Attributes:
        seen: by rank what is compared: weights, outputs and states, by moment.
    """

    def __init__(self, configuration: Configuration, ranks: Iterable[int]) -> None:
        self.configuration = configuration
        self.replicas = [self.new_replica(rank) for rank in ranks]
        self.seen: dict[int, Seen] = {replica.rank: {} for replica in self.replicas}
        for replica in self.replicas:
            replica.pretrain()

    def new_replica(self, rank: int) -> Replica:
        return Replica(self.configuration, rank)

    @abstractmethod
    def passes(self, step: int) -> None:
        """Makes the forward and backward passes of a step."""

    @abstractmethod
    def reduce(self) -> None:
        """Has the method take the gradient, of a step that is skipped then."""

    @abstractmethod
    def update(self) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def optimizer_states(self) -> list[list[Any]]:
        """Returns, by replica and optimizer, the whole state."""

    @abstractmethod
    def start_anew(self) -> None:
        """Saves all, and goes on from that with a new model, optimizer and method."""

    @abstractmethod
    def reattach(self, method: str, settings: dict[str, Any]) -> None:
        """Consolidates, detaches and goes on with another method, or the same."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits for the weights, which the user is about to write to."""

    def give_back(self) -> None:  # noqa: B027
        """Gives the optimizers the model's own parameters, and takes them again."""

    def zero_grad(self) -> None:
        for replica in self.replicas:
            replica.zero_grad()

    def train_step(self, step: int) -> None:
        self.passes(step)
        self.update()
        self.zero_grad()

    def see(self, moment: str) -> None:
        """Notes the weights."""
        for replica in self.replicas:
            self.seen[replica.rank].update({f"{moment}: {name}": value for name, value in replica.weights().items()})

    def see_output(self, moment: str, step: int) -> None:
        for replica in self.replicas:
            self.seen[replica.rank][f"{moment}: output"] = replica.output(step)

    def see_states(self, moment: str) -> None:
        for replica, states in zip(self.replicas, self.optimizer_states(), strict=True):
            self.seen[replica.rank].update(flattened(f"{moment}: optimizer", whole(states)))

    def stop_in(self, where: str, step: int) -> None:
        """Raises in the pass of all ranks; the user catches it."""
        for replica in self.replicas:
            replica.model.stops = where
        with suppress(StopOnPurpose):
            self.passes(step)
        for replica in self.replicas:
            replica.model.stops = ""
            replica.recover()
        self.zero_grad()


def flattened(name: str, value: Any) -> Seen:
    """The leaves of nested containers, with names."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        return {name: value.detach().clone() if isinstance(value, Tensor) else value}
    return {key: leaf for index, one in pairs for key, leaf in flattened(f"{name}.{index}", one).items()}


def train(worker: Worker) -> None:
    """Trains as the worker's configuration has it."""
    for step in range(STEPS):
        if event := worker.configuration.events.get(step):
            EVENTS[event](worker, step)
        worker.train_step(step)
    worker.flush()
    worker.see("end")
    worker.see_output("end", STEPS)
    worker.resume()
    worker.see_states("end")


def flush_and_resume(worker: Worker, step: int) -> None:
    flush_alone(worker, step)
    worker.resume()


def flush_twice(worker: Worker, step: int) -> None:
    worker.flush()
    worker.flush()
    worker.see_output(f"flush {step}", step)
    worker.resume()
    worker.resume()


def flush_alone(worker: Worker, step: int) -> None:
    """The training goes on from the consolidated weights."""
    worker.flush()
    worker.see(f"flush {step}")


def skip(worker: Worker, step: int) -> None:
    worker.passes(50 + step)
    worker.zero_grad()


def skip_reduced(worker: Worker, step: int) -> None:
    worker.passes(50 + step)
    worker.reduce()
    worker.zero_grad()


def flush_within_a_step(worker: Worker, step: int) -> None:
    """Between two passes of different steps, of which the first is skipped."""
    worker.passes(50 + step)
    worker.zero_grad()
    flush_and_resume(worker, step)


def load_weights(worker: Worker, step: int) -> None:
    worker.flush()
    for replica in worker.replicas:
        replica.model.load_state_dict(replica.initial)


def load_optimizer(worker: Worker, step: int) -> None:
    """A state is loaded that is some steps old; on each rank its own."""
    states = worker.optimizer_states()
    worker.train_step(60 + step)
    for replica, of_replica in zip(worker.replicas, states, strict=True):
        for optimizer, state in zip(replica.optimizers, of_replica, strict=True):
            optimizer.load_state_dict(state)


def reattach(worker: Worker, step: int) -> None:
    assert worker.configuration.then is not None
    worker.reattach(*worker.configuration.then)


def act(name: str, worker: Worker, step: int) -> None:
    """Does what users do between two steps."""
    worker.synchronize()
    habit = HABITS[name].after_step
    assert habit is not None
    for replica in worker.replicas:
        loop = Loop(replica.model, replica.optimizers[0])
        loop.number = ONCE
        habit(loop)


#: Habits that any model allows, with whole replicas.
OF_HABITS = ["clamp weights", "add noise", "rebind data", "lower the rate", "save and load weights"]

#: What may happen before a step.
EVENTS: dict[str, Callable[[Worker, int], None]] = {
    "flush and resume": flush_and_resume,
    "flush twice": flush_twice,
    "flush": flush_alone,
    "evaluate": lambda worker, step: worker.see_output(f"step {step}", step),
    "optimizer states": lambda worker, step: worker.see_states(f"step {step}"),
    "skip": skip,
    "skip reduced": skip_reduced,
    "flush within a step": flush_within_a_step,
    "raise in forward": lambda worker, step: worker.stop_in("forward", 70 + step),
    "raise in backward": lambda worker, step: worker.stop_in("backward", 70 + step),
    "load weights": load_weights,
    "load optimizer": load_optimizer,
    "checkpoint": lambda worker, step: worker.start_anew(),
    "reattach": reattach,
    "give back": lambda worker, step: worker.give_back(),
    **{name: partial(act, name) for name in OF_HABITS},
}
