"""The rules by which methods join replicas, in plain PyTorch; all replicas are in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.fuzz.training import Replica
from tests.references.local_sgd import is_due
from tests.references.selsync import Decisions, mean, squared_norm

Settings = dict[str, Any]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Buffers:
    """The buffers of all ranks.

    Args:
        lines: ranks with the same place in their replicas, by replica.

    Attributes:
        common: what all had after the last average.
    """

    def __init__(self, lines: list[list[Replica]]) -> None:
        self.lines = lines
        self.common = [buffer.clone() for buffer in lines[0][0].model.buffers()]

    def _of_lines(self) -> list[list[list[Tensor]]]:
        """Returns each buffer by line and replica."""
        by_rank = [[list(replica.model.buffers()) for replica in line] for line in self.lines]
        return [[[own[i] for own in line] for line in by_rank] for i in range(len(by_rank[0][0]))]

    def share(self) -> None:
        """Makes them rank 0's."""
        for lines in self._of_lines():
            _set([buffer for line in lines for buffer in line], lines[0][0].clone())

    def average(self) -> None:
        """Averages those that some rank has changed."""
        for position, lines in enumerate(self._of_lines()):
            buffers, first = [buffer for line in lines for buffer in line], lines[0][0]
            if any(not torch.equal(buffer, self.common[position]) for buffer in buffers):
                average = mean([mean(line) for line in lines]) if first.is_floating_point() else first.clone()
                _set(buffers, average)
                self.common[position] = average

    def average_for_now(self) -> Callable[[], None]:
        """Averages them; returns what undoes it."""
        kept = [[[buffer.clone() for buffer in line] for line in lines] for lines in self._of_lines()]
        common = list(self.common)
        self.average()

        def undo() -> None:
            for lines, own in zip(self._of_lines(), kept, strict=True):
                for line, values in zip(lines, own, strict=True):
                    for buffer, value in zip(line, values, strict=True):
                        buffer.copy_(value)
            self.common = common

        return undo


def _set(tensors: list[Tensor], value: Tensor) -> None:
    for tensor in tensors:
        tensor.copy_(value)


class Rule:
    """What a method does with the replicas; this one is synchronous SGD.

    Args:
        replicas: one of each rank; of ranks with the same place in their replicas, if these have several.
        settings: the method's.

    Attributes:
        buffers: those of all ranks; None: another rule is for them.
    """

    buffers: Buffers | None = None

    def __init__(self, replicas: list[Replica], settings: Settings) -> None:
        self.replicas, self.settings = replicas, settings

    def optimizers(self, index: int) -> list[Optimizer]:
        """The same optimizer of each replica."""
        return [replica.optimizers[index] for replica in self.replicas]

    def together(self, index: int) -> list[list[Tensor]]:
        """The parameters of an optimizer; of each the ranks' own."""
        return [list(own) for own in zip(*map(parameters_of, self.optimizers(index)), strict=True)]

    def reduce(self, index: int) -> bool:
        """Sets the gradients that are about to be clipped and applied; returns whether there is an update."""
        average_gradients(self.together(index))
        return True

    def measure(self, index: int) -> None:
        """Sees the gradients unscaled."""

    def step(self, index: int) -> None:
        """Ends the step of an optimizer; the replicas have been updated."""

    def skip(self, index: int) -> None:
        """Forgets a step that was reduced and measured."""

    @torch.no_grad()
    def consolidate(self) -> Callable[[], None]:
        """Makes the weights what all ranks read; returns what undoes it."""
        if self.buffers is not None:
            self.buffers.share()
        return lambda: None


def average_gradients(parameters: list[list[Tensor]]) -> None:
    """As DDP: a gradient that no rank has stays None, and one that a rank lacks is zero there."""
    for own in parameters:
        if all(p.grad is None for p in own):
            continue
        average = mean([torch.zeros_like(p) if p.grad is None else p.grad for p in own])
        for p in own:
            p.grad = average.clone(memory_format=torch.preserve_format)


def tell_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Has the scaler skip the update also where an infinite gradient has come from another rank after unscaling."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(1.0)


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


class Delayed(Rule):
    """Pipe-SGD: a gradient is applied some steps later, with the hyper-parameters of its own step."""

    def __init__(self, replicas: list[Replica], settings: Settings) -> None:
        super().__init__(replicas, settings)
        self.in_flight: list[list[tuple[Any, ...]]] = [[] for _ in replicas[0].optimizers]
        self.num_steps = [0] * len(self.in_flight)
        self.shown: dict[Optimizer, list[dict[str, Any]]] = {}

    def reduce(self, index: int) -> bool:
        average_gradients(self.together(index))
        scaler = self.replicas[0].scaler
        self.in_flight[index].append(
            (
                [[p.grad for p in parameters_of(optimizer)] for optimizer in self.optimizers(index)],
                [hyperparameters(optimizer) for optimizer in self.optimizers(index)],
                1.0 if scaler is None else scaler.get_scale(),
            )
        )
        warming_up = self.num_steps[index] < self.settings.get("warmup_steps", 0)
        self.num_steps[index] += 1
        if len(self.in_flight[index]) <= (0 if warming_up else self.settings["staleness"]):
            return False
        gradients, of_then, scale_then = self.in_flight[index].pop(0)
        for optimizer, own, groups in zip(self.optimizers(index), gradients, of_then, strict=True):
            scale = 1.0 if scaler is None else scaler.get_scale() / scale_then
            for p, gradient in zip(parameters_of(optimizer), own, strict=True):
                p.grad = None if gradient is None else gradient * scale
            self.shown[optimizer] = hyperparameters(optimizer)
            for group, then in zip(optimizer.param_groups, groups, strict=True):
                group.update(then)
        return True

    def step(self, index: int) -> None:
        for optimizer in self.optimizers(index):
            for group, now in zip(optimizer.param_groups, self.shown.pop(optimizer, []), strict=False):
                group.update(now)

    def skip(self, index: int) -> None:
        self.step(index)


class Replicated(Rule):
    """Replicas that are averaged now and then."""

    def reduce(self, index: int) -> bool:
        return True

    @torch.no_grad()
    def average_weights(self, index: int) -> None:
        for own in self.together(index):
            average = mean(own)
            for p in own:
                p.copy_(average)

    def average_buffers(self) -> None:
        if self.buffers is not None:
            self.buffers.average()

    @torch.no_grad()
    def consolidate(self) -> Callable[[], None]:
        kept = [[p.clone() for p in replica.model.parameters()] for replica in self.replicas]
        undo_buffers = None if self.buffers is None else self.buffers.average_for_now()
        for index in range(len(self.replicas[0].optimizers)):
            self.average_weights(index)

        @torch.no_grad()
        def undo() -> None:
            for replica, own in zip(self.replicas, kept, strict=True):
                for p, value in zip(replica.model.parameters(), own, strict=True):
                    p.copy_(value)
            if undo_buffers is not None:
                undo_buffers()

        return undo


class SelectivelySynchronized(Replicated):
    """SelSync, Algorithm 1."""

    def __init__(self, replicas: list[Replica], settings: Settings) -> None:
        super().__init__(replicas, settings)
        given = {name: settings[name] for name in ("delta", "lssr", "window", "smoothing")}
        self.decisions = [Decisions(len(replicas), **given) for _ in replicas[0].optimizers]
        self.flags = [False for _ in self.decisions]

    def measure(self, index: int) -> None:
        gradients = [[p.grad for p in parameters_of(optimizer)] for optimizer in self.optimizers(index)]
        self.flags[index] = self.decisions[index].decide([squared_norm(own) for own in gradients])
        if self.settings["aggregation"] == "gradients" and self.flags[index]:
            average_gradients(self.together(index))

    def step(self, index: int) -> None:
        if self.flags[index]:
            self.average_buffers()
            if self.settings["aggregation"] == "parameters":
                self.average_weights(index)

    def skip(self, index: int) -> None:
        self.decisions[index].skip()


class Periodic(Replicated):
    """Local SGD: an average of the weights every so many steps, after a warm-up with averaged gradients."""

    def __init__(self, replicas: list[Replica], settings: Settings) -> None:
        super().__init__(replicas, settings)
        self.num_steps = [0] * len(replicas[0].optimizers)

    def reduce(self, index: int) -> bool:
        if self.num_steps[index] < self.settings["warmup_steps"]:
            average_gradients(self.together(index))
        return True

    def step(self, index: int) -> None:
        self.num_steps[index] += 1
        step = self.num_steps[index] - self.settings["warmup_steps"]
        if step > 0 and is_due(step, self.settings["period"]):
            self.average_weights(index)
            if index == 0:
                self.average_buffers()
