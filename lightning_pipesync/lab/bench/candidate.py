"""A candidate of the benchmarks: a way to train a model, which is timed, or trains a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.round_robin import Timed, time_round_robin

#: Runs the passes of a step: called with what computes the loss, and with what raises if the passes are not needed.
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
    """A candidate that trains tasks, too: on given batches, and on emulated hosts.

    ``module`` is the model's module or a wrapper of it. Gradients are clipped to the norm ``max_norm``, if it is set.
    """

    max_norm: float | None = None
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
        """Clips the gradient and updates the weights."""

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        """Yields the module with the consolidated weights; a collective call."""
        yield self.model.module

    @property
    @abstractmethod
    def mib_sent(self) -> float:
        """MiB that this rank has sent so far."""

    @property
    @abstractmethod
    def lssr(self) -> float | None:
        """The share of local steps (SelSync, Eq. 4); None if it is not defined."""


def time_candidates(
    candidates: Iterable[Candidate], num_steps: int, rounds: int, progress: Callable[[str], object]
) -> dict[str, Timed]:
    """Times a step of each candidate by name, in turns, and closes them; a collective call.

    A measurement has ``num_steps`` steps, or of a candidate with periods as many whole ones as that takes.
    ``progress`` is called with the name of each that was measured.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    steps = {name: -(-num_steps // made.period) * made.period for name, made in by_name.items()}

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
