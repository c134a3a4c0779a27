"""BackPipe and FeedPipe (DeAR, Section III-B): what communicates when. Nothing here communicates.

The all-reduce of a bucket is two operations: a reduce-scatter of the gradients (OP1) and an all-gather (OP2). BackPipe
starts a reduce-scatter in the backward pass as soon as a bucket's gradients are ready. FeedPipe starts the all-gathers
after the last reduce-scatter, but for those that `eager.py` has start before, and a module waits for its own weights
only, before its forward pass.

[Note: one order on all ranks]
Ranks must issue the same operations in the same order, also where their graphs, and with them the order of their
gradients, differ. So both orders are fixed for all ranks when the buckets are made, from what rank 0 observed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.methods.dear.step_times import StepTimes

K = TypeVar("K", bound=Hashable)
CPU = torch.device("cpu")


class BackPipeSchedule:
    """Which reduce-scatters start in one backward pass, as its gradients become ready.

    They start in the order of the buckets, see [Note: one order on all ranks]: that of a bucket when all of its
    gradients are ready and all earlier ones have started.

    Args:
        num_gradients: for each bucket the number of gradients that the backward pass computes.

    Attributes:
        num_started: number of buckets whose reduce-scatter has started: the first ones.
        outdated: whether a gradient has changed after the reduce-scatter of its bucket started.
    """

    def __init__(self, num_gradients: Sequence[int]) -> None:
        self._num_awaited = list(num_gradients)
        self.num_started = 0
        self.outdated = False

    def gradient_is_ready(self, bucket: int) -> range:
        """Returns the buckets whose reduce-scatter starts, now that a gradient of ``bucket`` is ready."""
        if bucket < self.num_started:
            self.outdated = True
            return range(0)
        self._num_awaited[bucket] -= 1
        end = self.num_started
        while end < len(self._num_awaited) and self._num_awaited[end] <= 0:
            end += 1
        return self._start(end)

    def finish(self) -> range:
        """Returns the buckets whose reduce-scatter starts at the end: those of which gradients are missing."""
        return self._start(len(self._num_awaited))

    def _start(self, end: int) -> range:
        started = range(self.num_started, end)
        self.num_started = end
        return started


class FeedPipeSchedule(Generic[K]):
    """In which order the all-gathers start, and which of them a module waits for.

    Args:
        buckets: the parameters of each bucket.
        needed: all parameters, in the order in which the forward pass needs them.

    Attributes:
        order: the buckets in the order of their all-gathers: the one that the forward pass needs first comes first.
    """

    def __init__(self, buckets: Sequence[Sequence[K]], needed: Sequence[K]) -> None:
        position = {parameter: index for index, parameter in enumerate(needed)}
        self.order = sorted(range(len(buckets)), key=lambda bucket: min(position[p] for p in buckets[bucket]))
        self._bucket_of = {parameter: index for index, members in enumerate(buckets) for parameter in members}

    def awaited(self, parameters: Sequence[K]) -> list[int]:
        """Returns the buckets that a module with these parameters waits for before its forward pass."""
        return list(dict.fromkeys(self._bucket_of[p] for p in parameters if p in self._bucket_of))


class ExecutionOrder:
    """Observes in which order gradients become ready and weights are needed.

    Args:
        module: the model.
        device: where it computes.

    Attributes:
        modules: those that register parameters themselves.
        ready: ids of parameters in the order of their gradients.
        needed: ids of parameters in the order of the forward pass.
        times: when that was, in some steps.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self.times = StepTimes(device)
        self.modules = modules_with_parameters(module)
        self.ready: dict[int, None] = {}
        self.needed: dict[int, None] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        self._not_run: dict[int, Tensor] = {}  # parameters of modules of which none has ever run
        for child in self.modules:
            for parameter in child.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(child)
                self._not_run[id(parameter)] = parameter
        self._running: set[nn.Module] = set()  # modules that have run in this step
        self._used_elsewhere: dict[int, Tensor] = {}

    @property
    def used_elsewhere(self) -> list[Tensor]:
        """Parameters that may be read where no module that registers them runs.

        These are parameters that had a gradient in a step in which no such module ran before, and parameters of which
        no such module has ever run.
        """
        return [*self._used_elsewhere.values(), *self._not_run.values()]

    def begin_step(self) -> None:
        """Begins the observation of a step."""
        self._running.clear()
        self.times.end_step()

    def forward_begins(self, module: nn.Module) -> bool:
        """Observes that one of the ``modules`` begins its forward pass; returns whether that is its first in a step."""
        if module in self._running:
            return False
        self._running.add(module)
        for parameter in module.parameters(recurse=False):
            self.needed[id(parameter)] = None
            self._not_run.pop(id(parameter), None)
        return True

    def gradient_is_ready(self, parameter: Tensor) -> None:
        """Observes that a parameter's gradient is ready."""
        self.ready[id(parameter)] = None
        self.times.gradient_is_ready(parameter)
        if self._running.isdisjoint(self._owners.get(id(parameter), ())):
            self._used_elsewhere[id(parameter)] = parameter
