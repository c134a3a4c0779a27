"""In which order, and when, gradients become ready and weights are needed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from lightning_pipesync.core.clock import Clock, Moment
from lightning_pipesync.core.parameters import modules_with_parameters, parameters_needed_by

CPU = torch.device("cpu")

#: The first step allocates memory and does not count; then so many are measured.
WARM_UP, MEASURED = 1, 3


class StepTimes:
    """Measures some steps after :meth:`begin`; before and afterwards it costs nothing.

    ``ready`` are the seconds from the first gradient of backward to that of a parameter, by the parameter's id;
    ``needed`` those of computation from the beginning of forward until it is needed. Both are medians over the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self.measuring = False  # the same on all ranks
        self.ready: dict[int, float] = {}
        self.needed: dict[int, float] = {}
        self._ready: list[dict[int, Moment]] = []  # for each step: by id of a parameter
        self._forward: list[list[tuple[Moment, Moment, list[int]]]] = []  # begin and end of a wait, ids of parameters

    def begin(self) -> None:
        self.measuring = True
        self._ready, self._forward = [{}], [[]]

    def gradient_is_ready(self, parameter: Tensor) -> None:
        """Notes that a parameter's gradient is ready; the last time in a backward pass counts."""
        if self.measuring:
            self._ready[-1][id(parameter)] = self._clock.now()

    def now(self) -> Moment | None:
        """Returns the present moment, while measuring."""
        return self._clock.now() if self.measuring else None

    def module_has_waited(self, module: nn.Module, since: Moment | None) -> None:
        """Notes that a module, in its first run of a step, has its weights, for which it has waited since ``since``."""
        if since is not None:
            ids = [id(parameter) for parameter in parameters_needed_by(module)]
            self._forward[-1].append((since, self._clock.now(), ids))

    def end_step(self) -> None:
        """Ends a step: its backward pass, and the forward pass before. Computes the medians after the last step."""
        if not self.measuring:
            return
        if len(self._ready) < WARM_UP + MEASURED:
            self._ready.append({})
            self._forward.append([])
            return
        self.measuring = False
        self.ready = _medians([self._since_first(moments) for moments in self._ready[WARM_UP:] if moments])
        self.needed = _medians([self._without_waits(waits) for waits in self._forward[WARM_UP:]])
        self._ready, self._forward = [], []

    def _since_first(self, moments: dict[int, Moment]) -> dict[int, float]:
        first = next(iter(moments.values()))
        return {key: self._clock.seconds_between(first, moment) for key, moment in moments.items()}

    def _without_waits(self, waits: Sequence[tuple[Moment, Moment, list[int]]]) -> dict[int, float]:
        needed: dict[int, float] = {}
        waited = 0.0
        for begin, end, ids in waits:
            computed = self._clock.seconds_between(waits[0][0], begin) - waited
            waited += self._clock.seconds_between(begin, end)
            for key in ids:
                needed.setdefault(key, computed)
        return needed


def _medians(steps: Sequence[dict[int, float]]) -> dict[int, float]:
    keys = {key: None for step in steps for key in step}
    return {key: median(step[key] for step in steps if key in step) for key in keys}


class ExecutionOrder:
    """Observes the order of gradients (``ready``) and of the forward pass (``needed``), by the ids of parameters.

    ``modules`` are those that need parameters, see :func:`parameters_needed_by`.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self.times = StepTimes(device)
        self.modules = modules_with_parameters(module)
        self.ready: dict[int, None] = {}
        self.needed: dict[int, None] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        self._not_run: dict[int, Tensor] = {}  # parameters of modules of which none has ever run
        for child in self.modules:
            for parameter in parameters_needed_by(child):
                self._owners.setdefault(id(parameter), []).append(child)
                self._not_run[id(parameter)] = parameter
        self._running: set[nn.Module] = set()  # modules that have run in this step
        self._used_elsewhere: dict[int, Tensor] = {}

    @property
    def used_elsewhere(self) -> list[Tensor]:
        """Parameters that may be read where no module that registers them runs.

        In some step no such module had run when their gradient was ready, or none has ever run.
        """
        return [*self._used_elsewhere.values(), *self._not_run.values()]

    def begin_step(self) -> None:
        self._running.clear()
        self.times.end_step()

    def forward_begins(self, module: nn.Module) -> bool:
        """Observes that one of the ``modules`` begins its forward pass; returns whether that is its first in a step."""
        if module in self._running:
            return False
        self._running.add(module)
        for parameter in parameters_needed_by(module):
            self.needed[id(parameter)] = None
            self._not_run.pop(id(parameter), None)
        return True

    def gradient_is_ready(self, parameter: Tensor) -> None:
        self.ready[id(parameter)] = None
        self.times.gradient_is_ready(parameter)
        if self._running.isdisjoint(self._owners.get(id(parameter), ())):
            self._used_elsewhere[id(parameter)] = parameter
