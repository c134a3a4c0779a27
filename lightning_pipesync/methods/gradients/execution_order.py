"""In which order gradients become ready and weights are needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.methods.gradients.step_times import StepTimes

CPU = torch.device("cpu")


class ExecutionOrder:
    """Observes in which order gradients become ready and weights are needed.

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
