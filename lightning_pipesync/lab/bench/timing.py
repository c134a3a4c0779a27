"""Times several operations in turns, so that the noise of the machine affects all equally, and the parts of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync.core.clock import Clock, Moment
from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.predictions.limits import LayerTimes
from lightning_pipesync.lab.predictions.work import Profile

if TYPE_CHECKING:
    from lightning_pipesync.lab.bench.candidates import Trainable


@dataclass(frozen=True)
class Timed:
    """The measurements of an operation, round by round."""

    seconds: list[float]  # on the slowest rank
    processor_seconds: list[float]  # user and system time of all threads of a rank, the mean of all ranks

    def over(self, number: int) -> Timed:
        """Returns the measurements of one of ``number`` repetitions, of which the operation consists."""
        return Timed([value / number for value in self.seconds], [value / number for value in self.processor_seconds])


def time_round_robin(
    operations: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[str], object] = lambda name: None,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, Timed]:
    """Runs A B C A B C ... on all ranks of the default process group, and times each; a collective call.

    The first round is a warm-up. ``before`` and ``after`` are called with the name of each operation, untimed; after
    ``before``, all ranks start together.
    """
    seconds = torch.zeros(len(operations), rounds + 1, dtype=torch.float64)
    processor_seconds = torch.zeros_like(seconds)
    for round_ in range(rounds + 1):
        for i, (name, operation) in enumerate(operations.items()):
            before(name)
            finish_work()
            dist.barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            operation()
            finish_work()
            seconds[i, round_] = time.perf_counter() - start
            processor_seconds[i, round_] = time.process_time() - processor_start
            after(name)
    of_ranks = [(seconds, processor_seconds)] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (seconds, processor_seconds))  # on any backend
    walls, processors = map(torch.stack, zip(*of_ranks, strict=True))
    each = zip(operations, walls.amax(0)[:, 1:].tolist(), processors.mean(0)[:, 1:].tolist(), strict=True)
    return {name: Timed(wall, processor) for name, wall, processor in each}


def timed(function: Callable[[], object]) -> float:
    """Returns how many seconds a function takes in this process, once."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def finish_work() -> None:
    """Waits for the work that a GPU has been given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def median_and_quartiles(seconds: list[float]) -> tuple[float, float, float]:
    """Returns the median, the lower and the upper quartile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, low, high


@dataclass(frozen=True)
class _Step:
    """Moments of a step: when its parts begin, and its end; when each weight is needed and each gradient is ready."""

    parts: list[Moment] = field(default_factory=list)
    needed: dict[int, Moment] = field(default_factory=dict)
    ready: dict[int, Moment] = field(default_factory=dict)


class StepRecorder:
    """Records when the parts of steps begin and end, and when each weight is needed and each gradient is ready.

    Call ``begin_forward``, ``begin_backward``, ``begin_update`` and ``end`` in each step. The first is not counted.
    """

    def __init__(self, module: nn.Module, clock: Clock) -> None:
        self._clock = clock
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._steps: list[_Step] = []
        self._step = _Step()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda parameter: self._note(self._step.ready, parameter))
            for parameter in self._parameters
        ]
        # FSDP2 puts other tensors in the place of parameters while a module runs.
        self._held = {one: list(one.parameters(recurse=False)) for one in module.modules()}
        self._handles += [one.register_forward_pre_hook(self._runs) for one in self._held]

    @property
    def num_steps(self) -> int:
        """The number of whole steps so far."""
        return len(self._steps)

    def begin_forward(self) -> None:
        """Begins a step; what was recorded of an unfinished one is dropped."""
        self._step = _Step([self._clock.now()])

    def begin_backward(self) -> None:
        self._step.parts.append(self._clock.now())

    def begin_update(self) -> None:
        self._step.parts.append(self._clock.now())

    def end(self) -> bool:
        """Ends a step; returns whether it had all parts, and is counted."""
        if len(self._step.parts) != 3:
            return False
        self._step.parts.append(self._clock.now())
        self._steps.append(self._step)
        return True

    def close(self) -> None:
        """Ends the recording."""
        for handle in self._handles:
            handle.remove()

    def profile(self) -> Profile:
        """Returns the medians of all steps but the first, of which there must be one."""
        between, steps = self._clock.seconds_between, self._steps[1:]
        needed = [{key: between(step.parts[0], moment) for key, moment in step.needed.items()} for step in steps]
        ready = [{key: between(step.parts[1], moment) for key, moment in step.ready.items()} for step in steps]
        # What follows the last gradient is a wait for others.
        backward = [max(of_step.values(), default=0.0) for of_step in ready]
        tensors = [
            LayerTimes(
                ready=median(step[id(p)] for step in ready),
                needed=median(step.get(id(p), 0.0) for step in needed),
                num_bytes=local_of(p).numel() * p.element_size(),
                shape=tuple(local_of(p).shape),
            )
            for p in self._parameters
            if all(id(p) in step for step in ready)
        ]
        return Profile(
            forward=median(between(step.parts[0], step.parts[1]) for step in steps),
            backward=median(backward),
            update=median(between(step.parts[2], step.parts[3]) for step in steps),
            tensors=sorted(tensors, key=lambda tensor: tensor.ready),
        )

    def pace(self) -> tuple[float, float]:
        """Returns the seconds from a step to the next, and those of them from the last gradient to the update.

        For these DDP waits for its all-reduces.
        """
        between, [first, *steps] = self._clock.seconds_between, self._steps
        backward = [between(step.parts[1], step.parts[2]) for step in steps]
        last = [max(between(step.parts[1], moment) for moment in step.ready.values()) for step in steps]
        seconds = between(first.parts[-1], steps[-1].parts[-1]) / len(steps)
        return seconds, median(took - until for took, until in zip(backward, last, strict=True))

    def _note(self, moments: dict[int, Moment], parameter: Any) -> None:
        if self._step.parts:
            moments.setdefault(id(parameter), self._clock.now())

    def _runs(self, module: nn.Module, _: Any) -> None:
        for parameter in self._held[module]:
            self._note(self._step.needed, parameter)


def profile_step(candidate: Trainable, rounds: int = 5) -> Profile:
    """Measures the parts of a step without communication on this rank: medians over several steps.

    What is between the parts counts as update.
    """
    clock = Clock(device_of(candidate.module))
    recorder = StepRecorder(candidate.module, clock)
    moments = [clock.now()]
    for _ in range(rounds + 1):
        candidate.optimizer.zero_grad()
        recorder.begin_forward()
        loss = candidate.model.loss(candidate.module, candidate.batch)
        recorder.begin_backward()
        loss.backward()
        recorder.begin_update()
        candidate.optimizer.step()
        recorder.end()
        moments.append(clock.now())
    recorder.close()
    profile = recorder.profile()
    whole = median(clock.seconds_between(*pair) for pair in pairwise(moments[1:]))
    between = whole - profile.forward - profile.backward - profile.update
    return replace(profile, update=profile.update + max(0.0, between))
