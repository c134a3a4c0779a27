"""When gradients become ready and modules run, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from lightning_pipesync.core.clock import Clock, Moment

#: The first step allocates memory and does not count; then so many are measured.
WARM_UP, MEASURED = 1, 3


class StepTimes:
    """Measures the first steps of a training; then it costs nothing.

    Args:
        device: where the model computes.

    Attributes:
        num_steps: steps seen, as many on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self.num_steps = 0
        self._ready: list[dict[int, Moment]] = []  # for each step: by id of a parameter
        self._forward: list[list[tuple[Moment, Moment, list[int]]]] = []  # begin and end of a wait, ids of parameters
        self.begin()

    @property
    def measuring(self) -> bool:
        """Whether further steps are to be measured."""
        return self.num_steps < WARM_UP + MEASURED

    def begin(self) -> None:
        """Measures anew, since other parameters are trained."""
        self.num_steps = 0
        self._ready, self._forward = [{}], [[]]

    def gradient_is_ready(self, parameter: Tensor) -> None:
        """Notes that a parameter's gradient is ready, the last time in a backward pass."""
        if self.measuring:
            self._ready[-1][id(parameter)] = self._clock.now()

    def now(self) -> Moment | None:
        """Returns the present moment, while measuring."""
        return self._clock.now() if self.measuring else None

    def module_has_waited(self, module: nn.Module, since: Moment | None) -> None:
        """Notes that a module has its weights, for which it has waited since ``since``."""
        if since is not None:
            ids = [id(parameter) for parameter in module.parameters(recurse=False)]
            self._forward[-1].append((since, self._clock.now(), ids))

    def end_step(self) -> None:
        """Ends a step: its backward pass, and the forward pass before."""
        if self.measuring:
            self.num_steps += 1
            if self.measuring:
                self._ready.append({})
                self._forward.append([])

    def ready(self) -> dict[int, float]:
        """Returns seconds since the first gradient of backward, by id of a parameter; the median of the steps."""
        steps = []
        for moments in self._ready[WARM_UP:]:
            first = next(iter(moments.values()), None)
            if first is not None:
                steps.append({key: self._clock.seconds_between(first, moment) for key, moment in moments.items()})
        return _medians(steps)

    def needed(self) -> dict[int, float]:
        """Returns seconds of computation since forward began, by id of a parameter; the median of the steps."""
        steps = []
        for waits in self._forward[WARM_UP:]:
            needed: dict[int, float] = {}
            waited = 0.0
            for begin, end, ids in waits:
                computed = self._clock.seconds_between(waits[0][0], begin) - waited
                waited += self._clock.seconds_between(begin, end)
                for key in ids:
                    needed.setdefault(key, computed)
            steps.append(needed)
        return _medians(steps)


def _medians(steps: Sequence[dict[int, float]]) -> dict[int, float]:
    keys = {key: None for step in steps for key in step}
    return {key: median(step[key] for step in steps if key in step) for key in keys}
