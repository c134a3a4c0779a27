"""The parts of a training step without communication, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from lightning_pipesync.bench.candidates import Wrapped
from lightning_pipesync.core.layer_limits import LayerTimes


@dataclass(frozen=True)
class Profile:
    """One rank's step without communication.

    Attributes:
        forward: seconds.
        backward: seconds.
        update: seconds.
        tensors: in the order in which their gradients become ready.
    """

    forward: float
    backward: float
    update: float
    tensors: Sequence[LayerTimes]


class StepRecorder:
    """Records when the parts of steps begin and end, and when each weight is needed and each gradient is ready.

    Call ``begin_forward``, ``begin_backward``, ``begin_update`` and ``end`` in each step. The first is not counted.

    Args:
        module: the module that is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._ready: list[dict[int, float]] = [{}]
        self._needed: list[dict[int, float]] = [{}]
        self._parts: list[tuple[float, float, float]] = []
        self._began: list[float] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda parameter: self._note(self._ready, parameter))
            for parameter in self._parameters
        ]
        self._handles += [one.register_forward_pre_hook(self._runs) for one in module.modules()]

    @property
    def num_steps(self) -> int:
        """The number of whole steps so far."""
        return len(self._parts)

    def begin_forward(self) -> None:
        """Begins a step; what was recorded of an unfinished one is dropped."""
        self._ready[-1], self._needed[-1] = {}, {}
        self._began = [perf_counter()]

    def begin_backward(self) -> None:
        self._began.append(perf_counter())

    def begin_update(self) -> None:
        self._began.append(perf_counter())

    def end(self) -> bool:
        """Ends a step; returns whether it had all parts, and is counted."""
        if len(self._began) != 3:
            return False
        forward, backward, update = self._began
        self._parts.append((backward - forward, update - backward, perf_counter() - update))
        self._ready.append({})
        self._needed.append({})
        return True

    def close(self) -> None:
        """Ends the recording."""
        for handle in self._handles:
            handle.remove()

    def profile(self) -> Profile:
        """Returns the medians of all steps but the first, of which there must be one."""
        forward, backward, update = (median(values) for values in zip(*self._parts[1:], strict=True))
        ready, needed = self._ready[1:-1], self._needed[1:-1]
        tensors = [
            LayerTimes(
                ready=median(step[id(p)] for step in ready),
                needed=median(step.get(id(p), 0.0) for step in needed),
                num_bytes=p.numel() * p.element_size(),
            )
            for p in self._parameters
            if all(id(p) in step for step in ready)
        ]
        return Profile(forward, backward, update, sorted(tensors, key=lambda tensor: tensor.ready))

    def _note(self, times: list[dict[int, float]], parameter: Any) -> None:
        if self._began:
            times[-1].setdefault(id(parameter), perf_counter() - self._began[-1])

    def _runs(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._note(self._needed, parameter)


def profile_step(candidate: Wrapped, rounds: int = 5) -> Profile:
    """Measures the parts of a step without communication on this rank: medians over several steps."""
    recorder = StepRecorder(candidate.module)
    for _ in range(rounds + 1):
        candidate.optimizer.zero_grad()
        recorder.begin_forward()
        loss = candidate.model.loss(candidate.module, candidate.batch)
        recorder.begin_backward()
        loss.backward()
        recorder.begin_update()
        candidate.optimizer.step()
        recorder.end()
    recorder.close()
    return recorder.profile()
