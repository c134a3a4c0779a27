"""All ranks in one process, in plain PyTorch: a model each, and a rule by which a method joins them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import found_overflow
from tests.fuzz.rules import Buffers, Replicated, Rule, Settings, mean, parameters_of, tell_overflow
from tests.fuzz.training import Replica, Worker

if TYPE_CHECKING:
    from tests.fuzz.configuration import Configuration
    from tests.fuzz.sharding import Sharding


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
        self._method_rules = rules
        self._follow(configuration.method, configuration.settings)
        self._undo: list[Callable[[], None]] = []

    def _follow(self, method: str, settings: Settings) -> None:
        """Has a method join the ranks with the same place in their replicas."""
        lines: dict[int, list[Replica]] = {}
        for replica in sorted(self.replicas, key=lambda replica: self.configuration.place_of(replica.rank)):
            lines.setdefault(self.configuration.place_of(replica.rank)[1], []).append(replica)
        self._rules = [self._method_rules[method](line, settings) for line in lines.values()]
        self._rules[0].buffers = Buffers(list(lines.values()))

    def passes(self, step: int) -> None:
        self._undo = []  # what was flushed, and not resumed, is what training goes on from
        configuration = self.configuration
        micros, sharding = list(range(configuration.accumulate)), configuration.sharding
        alone = sharding is not None and (sharding.reduces_passes or not configuration.no_sync)
        for together in [[micro] for micro in micros] if alone else [micros]:
            before = {} if sharding is None else {id(p): p.grad for p in self._parameters()}
            for p in self._parameters() if sharding is not None else ():
                p.grad = None
            stopped: Exception | None = None
            for replica in self.replicas:
                try:
                    for micro in together:
                        replica.backward(step, micro)
                except Exception as error:
                    stopped = error
            if stopped is None and sharding is not None:
                self._reduce_within_replicas(sharding)
            for p in self._parameters():
                if (kept := before.get(id(p))) is not None:
                    p.grad = kept if p.grad is None else kept + p.grad
            if stopped is not None:
                raise stopped

    def _parameters(self) -> list[Tensor]:
        return [p for replica in self.replicas for p in replica.model.parameters()]

    def _reduce_within_replicas(self, sharding: Sharding) -> None:
        """Averages the gradients of the ranks of a replica, as FSDP2 does."""
        dtype = sharding.reduce_dtype or sharding.param_dtype
        for number in range(sharding.num_replicas):
            models = [self.replicas[rank].model for rank in sharding.ranks_of(number)]
            for own in zip(*(model.parameters() for model in models), strict=True):
                if own[0].grad is not None:
                    average = mean([p.grad.to(dtype or p.dtype) for p in own]).to(own[0].dtype)
                    for p in own:
                        p.grad = average.clone()

    def reduce(self) -> None:
        for index in range(len(self.replicas[0].optimizers)):
            self._reduce(index)
            for rule in self._rules:
                rule.skip(index)
        for replica in self.replicas:
            replica.forget_unscaling()

    def _reduce(self, index: int) -> bool:
        updates = self._rules[0].reduce(index)
        for rule in self._rules[1:]:
            rule.reduce(index)
        for replica in self.replicas:
            if not updates:
                for p in parameters_of(replica.optimizers[index]):
                    p.grad = None if p.grad is None else torch.zeros_like(p)
            if replica.scaler is not None:
                replica.scaler.unscale_(replica.optimizers[index])
        for rule in self._rules:
            rule.measure(index)
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
                if replica.scaler is None:
                    optimizer.step()
                elif not found_overflow(replica.scaler, optimizer):
                    # PyTorch's fused SGD that skips its first step keeps a momentum that was never initialized.
                    replica.scaler.step(optimizer)
            for rule in self._rules:
                rule.step(index)
        for replica in self.replicas:
            replica.end_step()

    def flush(self) -> None:
        self.resume()
        self._undo = [rule.consolidate() for rule in self._rules]

    def resume(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def optimizer_states(self) -> list[list[Any]]:
        return [[copy.deepcopy(one.state_dict()) for one in replica.optimizers] for replica in self.replicas]

    def start_anew(self) -> None:
        self.flush()
        self.resume()
        for replica in self.replicas:
            replica.model.zero_grad()  # a new model has no gradients
            if not isinstance(self._rules[0], Replicated):  # which keep each rank's own state, as it is
                replica.load_states(copy.deepcopy(replica.states()))  # PyTorch may give a state another dtype

    def reattach(self, method: str, settings: Settings) -> None:
        self.flush()
        self._undo = []
        if isinstance(self._rules[0], Replicated):
            shared = copy.deepcopy(self.replicas[0].states())
            for replica in self.replicas:
                replica.load_states(copy.deepcopy(shared))
        self._follow(method, settings)
