"""All ranks in one process, in plain PyTorch: a replica each, and a rule by which a method joins them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.fuzz.training import Replica, Worker
from tests.reference_selsync import next_delta, relative_change

if TYPE_CHECKING:
    from tests.fuzz.configuration import Configuration

Settings = dict[str, Any]


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean, added in the order of the ranks, in float32 at least."""
    at_least = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(at_least)
    for tensor in tensors[1:]:
        total = total + tensor.to(at_least)
    return (total / len(tensors)).to(tensors[0].dtype)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Rule:
    """What a method does with the replicas; this one is synchronous SGD.

    Args:
        replicas: one of each rank.
        settings: the method's.
    """

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
        for own in zip(*(replica.model.buffers() for replica in self.replicas), strict=True):
            for buffer in own[1:]:
                buffer.copy_(own[0])
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

    def __init__(self, replicas: list[Replica], settings: Settings) -> None:
        super().__init__(replicas, settings)
        self.common_buffers = [buffer.clone() for buffer in replicas[0].model.buffers()]

    def reduce(self, index: int) -> bool:
        return True

    @torch.no_grad()
    def average_weights(self, index: int) -> None:
        for own in self.together(index):
            average = mean(own)
            for p in own:
                p.copy_(average)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Averages those that some rank has changed."""
        for position, own in enumerate(zip(*(replica.model.buffers() for replica in self.replicas), strict=True)):
            if all(torch.equal(buffer, self.common_buffers[position]) for buffer in own):
                continue
            average = mean(own) if own[0].is_floating_point() else own[0].clone()
            for buffer in own:
                buffer.copy_(average)
            self.common_buffers[position] = average

    def consolidate(self) -> Callable[[], None]:
        kept = [copy.deepcopy(replica.model.state_dict()) for replica in self.replicas]
        common = list(self.common_buffers)
        for index in range(len(self.replicas[0].optimizers)):
            self.average_weights(index)
        self.average_buffers()

        def undo() -> None:
            for replica, own in zip(self.replicas, kept, strict=True):
                replica.model.load_state_dict(own)
            self.common_buffers = common

        return undo


class SelectivelySynchronized(Replicated):
    """SelSync, Algorithm 1."""

    def __init__(self, replicas: list[Replica], settings: Settings) -> None:
        super().__init__(replicas, settings)
        indices = range(len(replicas[0].optimizers))
        self.squared_norms: list[list[list[float]]] = [[[] for _ in replicas] for _ in indices]
        delta = settings["delta"]
        self.thresholds = [0.01 * settings["smoothing"] if delta == "auto" else delta for _ in indices]
        self.flags = [False for _ in indices]
        self.before: Any = None

    def measure(self, index: int) -> None:
        self.before = copy.deepcopy((self.squared_norms[index], self.thresholds[index]))
        changes = []
        for optimizer, values in zip(self.optimizers(index), self.squared_norms[index], strict=True):
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            squared_norm = sum(float(gradient.double().square().sum()) for gradient in gradients)
            if not math.isfinite(squared_norm):
                changes.append(math.inf)
                continue
            values.append(squared_norm)
            changes.append(relative_change(values, self.settings["window"], self.settings["smoothing"]))
        threshold = self.thresholds[index]
        self.flags[index] = threshold < math.inf and max(changes) >= threshold
        if self.settings["delta"] == "auto" and max(changes) < math.inf:
            self.thresholds[index] = next_delta(threshold, self.settings["lssr"], self.flags[index])
        if self.settings["aggregation"] == "gradients" and self.flags[index]:
            average_gradients(self.together(index))

    def step(self, index: int) -> None:
        if self.flags[index]:
            self.average_buffers()
            if self.settings["aggregation"] == "parameters":
                self.average_weights(index)

    def skip(self, index: int) -> None:
        self.squared_norms[index], self.thresholds[index] = self.before


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
        if step > 0 and step % self.settings["period"] == 0:
            self.average_weights(index)
            if index == 0:
                self.average_buffers()


class Reference(Worker):
    """All ranks in this process.

    Args:
        rule: of the method with which the training begins.
        rules: by the name of a method, for those that go on.
    """

    def __init__(
        self, configuration: Configuration, rules: dict[str, Callable[[list[Replica], Settings], Rule]]
    ) -> None:
        super().__init__(configuration, range(configuration.world_size))
        self._rules = rules
        self._rule = rules[configuration.method](self.replicas, configuration.settings)
        self._undo: Callable[[], None] = lambda: None

    def passes(self, step: int) -> None:
        self._undo = lambda: None  # what was flushed, and not resumed, is what training goes on from
        stopped: Exception | None = None
        for replica in self.replicas:
            try:
                for micro in range(self.configuration.accumulate):
                    replica.backward(step, micro)
            except Exception as error:
                stopped = error
        if stopped is not None:
            raise stopped

    def reduce(self) -> None:
        for index in range(len(self.replicas[0].optimizers)):
            self._reduce(index)
            self._rule.skip(index)
        for replica in self.replicas:
            replica.forget_unscaling()

    def _reduce(self, index: int) -> bool:
        updates = self._rule.reduce(index)
        for replica in self.replicas:
            if not updates:
                for p in parameters_of(replica.optimizers[index]):
                    p.grad = None if p.grad is None else torch.zeros_like(p)
            if replica.scaler is not None:
                replica.scaler.unscale_(replica.optimizers[index])
        self._rule.measure(index)
        for replica in self.replicas:
            if replica.scaler is not None:
                tell_overflow(replica.scaler, replica.optimizers[index])
        return updates

    def update(self) -> None:
        for index in range(len(self.replicas[0].optimizers)):
            updates = self._reduce(index)
            for replica in self.replicas if updates else []:
                optimizer = replica.optimizers[index]
                replica.clip(optimizer)
                optimizer.step() if replica.scaler is None else replica.scaler.step(optimizer)
            self._rule.step(index)
        for replica in self.replicas:
            replica.end_step()

    def flush(self) -> None:
        self._undo()
        self._undo = self._rule.consolidate()

    def resume(self) -> None:
        self._undo()
        self._undo = lambda: None

    def optimizer_states(self) -> list[list[Any]]:
        return [[copy.deepcopy(one.state_dict()) for one in replica.optimizers] for replica in self.replicas]

    def start_anew(self) -> None:
        self.flush()
        self.resume()
        for replica in self.replicas:
            replica.model.zero_grad()  # a new model has no gradients
            replica.load_states(copy.deepcopy(replica.states()))  # PyTorch may give a state another dtype then

    def reattach(self, method: str, settings: Settings) -> None:
        self.flush()
        self._undo = lambda: None
        if isinstance(self._rule, Replicated):
            shared = copy.deepcopy(self.replicas[0].states())
            for replica in self.replicas:
                replica.load_states(copy.deepcopy(shared))
        self._rule = self._rules[method](self.replicas, settings)
