"""A candidate of the benchmarks: a way to train a model, by a method or another library, which is timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.cluster import compression_of
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.round_robin import Timed, time_round_robin
from lightning_pipesync.methods.laboratory import BenchCandidate, LabEntry
from lightning_pipesync.training.registry import METHODS

#: Makes a candidate for a model; a collective call.
MakeCandidate = Callable[[BenchModel], "Candidate"]

#: Runs the passes of a step: called with what computes the loss, and with what raises if they are not needed.
RunPasses = Callable[[Callable[[], Tensor], Callable[[], object]], Any]

#: Every candidate trains with SGD, learning rate and momentum, unless its model has an optimizer.
LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class Candidate(ABC):
    """A way to train a model, the same on all ranks; its attributes are those of :class:`BenchCandidate`.

    ``transport`` carries its communication; None: another library communicates.
    """

    limit = "compute"
    compression = 1.0
    segments: int | None = None
    period = 1
    transport: Transport | None = None

    def __init__(self, name: str, model: BenchModel) -> None:
        self.name, self.model = name, model
        self.batch = model.make_batch(dist.get_rank())

    @abstractmethod
    def step(self) -> None:
        """Takes one training step on the model's batch."""

    def prepare(self) -> dict[str, Any] | None:
        """Runs before all measurements; returns the result of a search, if there is one."""
        return None

    def begin(self) -> None:
        """Takes steps until the operations in flight are those of the steady state."""
        self.step()

    def drain(self) -> None:  # noqa: B027 - most have nothing in flight between two steps
        """Waits for the operations in flight after a step."""

    def close(self) -> None:  # noqa: B027
        """Ends threads and process groups."""


class Trainable(Candidate):
    """A candidate that trains on given batches, too. ``module`` is the model's module or a wrapper of it."""

    run_passes: RunPasses

    def __init__(self, name: str, model: BenchModel, module: nn.Module) -> None:
        super().__init__(name, model)
        self.module, self.run_passes = module, forward_and_backward
        self.optimizer = model.optimizer(model.module) if model.optimizer else sgd(module.parameters())

    def step(self, batch: Any = None) -> None:
        """Takes one training step on a batch, or on the model's."""
        self.compute_gradient(batch)
        self.update()

    def compute_gradient(self, batch: Any = None, check: Callable[[], object] = lambda: None) -> Any:
        """Runs forward and backward pass, and returns the loss; ``check`` raises if the passes are not needed."""
        self.optimizer.zero_grad()
        batch = self.batch if batch is None else batch
        return self.run_passes(lambda: self.model.loss(self.module, batch), check)

    @abstractmethod
    def update(self) -> None:
        """Updates the weights."""


class Wrapped(Trainable):
    """A module that communicates in its backward pass, or not at all, and an optimizer: DDP, FSDP2, ZeRO."""

    def __init__(
        self, name: str, model: BenchModel, module: nn.Module, limit: str, optimizer: Optimizer | None = None
    ) -> None:
        super().__init__(name, model, module)
        self.limit = limit
        self.optimizer = optimizer or self.optimizer

    def update(self) -> None:
        self.optimizer.step()


class MethodCandidate(Trainable):
    """A method that synchronizes what a training loop computes, as it has ``declared``."""

    def __init__(self, model: BenchModel, method: Callable[..., Any], declared: BenchCandidate) -> None:
        super().__init__(declared.name, model, model.module)
        self.declared, self.limit = declared, declared.limit
        self.segments, self.period = declared.segments, declared.period
        self.sync = method(model.module, self.optimizer, declared.config)
        self.transport = self.sync.transport
        self.compression = compression_of(declared.codec, self.transport.world_size)
        self._check_of_pass = declared.check_of_pass(self.sync)
        for group in self.optimizer.param_groups:
            group["lr"] *= declared.lr_scale

    def step(self, batch: Any = None) -> None:
        self.declared.before_step(self.sync)
        if (check := self._check_of_pass) is None:
            super().step(batch)
        else:
            self.sync.step(lambda: self.optimizer.step(lambda: self.compute_gradient(batch, check)))

    def update(self) -> None:
        self.sync.step()

    def prepare(self) -> dict[str, Any] | None:
        return self.declared.prepare(self.sync, self.step)

    def begin(self) -> None:
        for _ in range(self.declared.warmup_steps):
            self.step()

    def drain(self) -> None:
        self.declared.drain(self.sync)

    def close(self) -> None:
        self.sync.detach()


class PipelineCandidate(Candidate):
    """A pipeline of an ``nn.Sequential``, one stage per rank; a step is as many mini-batches as there are stages."""

    def __init__(self, model: BenchModel, method: Callable[..., Any], declared: BenchCandidate) -> None:
        super().__init__(declared.name, model)
        self._pipeline = method(model.module, None, sgd, declared.config)
        batches = [self.batch]
        dist.broadcast_object_list(batches)  # the first stage uses the input, the last one the target
        self.batch = batches[0]
        self._inputs = inputs_of(model, self.batch)

    def step(self) -> None:
        for _ in range(self._pipeline.num_stages):
            self._pipeline.feed(lambda: self._inputs, self._loss)
            if self._pipeline.backward():
                self._pipeline.step()

    def begin(self) -> None:
        for _ in range(3):  # until the steady state
            self.step()

    def drain(self) -> None:
        self._pipeline.flush()

    def close(self) -> None:
        self._pipeline.detach()

    def _loss(self, output: Any, part: Callable[[Any], Any]) -> Tensor:
        module: Any = self.model.module
        module.forward = lambda *_, **__: output  # it is there already
        try:
            return self.model.loss(module, self.batch)
        finally:
            del module.forward


def lab_of(name: str) -> LabEntry:
    """Returns what the laboratory knows of a registered method."""
    method = METHODS[name]
    return method.lab(method)


def make_candidate(name: str, declared: BenchCandidate, **arguments: Any) -> MakeCandidate:
    """Returns a factory of the candidate that a method declares, with further ``arguments`` of the method."""
    method: Any = METHODS[name]
    kind = PipelineCandidate if method.makes_passes else MethodCandidate
    return partial(kind, method=partial(method, **arguments), declared=declared)


def time_candidates(
    candidates: Iterable[Candidate],
    num_steps: int,
    rounds: int,
    progress: Callable[[str], object] = lambda name: None,
    *,
    whole_periods: bool = True,
) -> dict[str, Timed]:
    """Times a step of each candidate by name, in turns, and closes them; a collective call.

    A measurement has ``num_steps`` steps, or with ``whole_periods`` as many periods of a candidate as that takes.
    ``progress`` is called with the name of each that was measured.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    periods = {name: made.period if whole_periods else 1 for name, made in by_name.items()}
    steps = {name: -(-num_steps // period) * period for name, period in periods.items()}

    def run(candidate: Candidate) -> None:
        for _ in range(steps[candidate.name]):
            candidate.step()

    def after(name: str) -> None:
        by_name[name].drain()
        progress(name)

    timed = time_round_robin(
        {name: partial(run, candidate) for name, candidate in by_name.items()},
        rounds,
        before=lambda name: by_name[name].begin(),
        after=after,
    )
    for candidate in by_name.values():
        candidate.close()
    return {name: measured.over(steps[name]) for name, measured in timed.items()}


def forward_and_backward(forward: Callable[[], Tensor], check: Callable[[], object]) -> Tensor:
    loss = forward()
    loss.backward()
    return loss


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def inputs_of(model: BenchModel, batch: Any) -> Any:
    """Returns what the loss of a model gives the module; runs a forward pass."""
    inputs: list[Any] = []
    handle = model.module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        with torch.no_grad():
            model.loss(model.module, batch)
    finally:
        handle.remove()
    return inputs[0]
