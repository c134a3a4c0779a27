"""The rounds of one optimizer's parameters: local steps, and averages of fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.exchange import exchange_fused
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import foreach_norm
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.local_sgd.algorithm import Rounds, in_fragments, number_of_participants, participants
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.replicas.flags import LOADED, raise_if_not_all_consolidate, raise_if_not_all_loaded
from lightning_pipesync.methods.replicas.gradients import GradientAggregation
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors, to_cpu

# The bits of a rank's flag: the number of its steps modulo 64, and that it is about to consolidate the weights. In the
# warm-up: a parameter has no gradient; its gradient is not finite.
STEPS, CONSOLIDATE = 64, 64
MISSING_GRADIENT, NOT_FINITE = 1, 2


@dataclass
class Flight:
    """An average of a fragment that has started and is not applied yet.

    Attributes:
        flags: of all ranks; None once they are checked.
        handles: of the fragment's buckets.
        results: the averages of these, once they have been moved out of the buffers.
    """

    flags: Handle[list[int]] | None = None
    handles: Sequence[Handle[Tensor]] = ()
    results: Sequence[Tensor] = ()


class OptimizerRounds:
    """Counts the steps of an optimizer, and averages its parameters fragment by fragment.

    Args:
        optimizer: the user's own.
        parameters: those of its parameters that no earlier optimizer has, in the order of their layers.
        config: the settings.
        transport: the way to the other ranks.

    Attributes:
        replicas: averages the parameters.
        num_steps: number of steps so far.
        num_rounds: number of periods that have ended.

    Raises:
        ValueError: there are fewer layers than fragments.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[NamedParameter], config: LocalSGDConfig, transport: Transport
    ) -> None:
        self._optimizer, self._config, self._transport = optimizer, config, transport
        self.num_steps = 0
        buckets: list[list[Tensor]] = []
        self._fragments: list[range] = []  # indices of their buckets
        for fragment in _fragments(parameters, config.fragments):
            plan = plan_buckets(fragment, Fusion(bucket_mb=config.bucket_mb))
            self._fragments.append(range(len(buckets), len(buckets) + len(plan)))
            buckets += [[parameter.tensor for parameter in bucket] for bucket in plan]
        world_size, feedback = transport.world_size, config.uses_error_feedback
        outer, force = config.make_outer_optimizer(world_size), config.force(world_size)
        self.replicas = ReplicatedTensors(buckets, transport, config.compression, feedback, outer, force)
        self._buckets = buckets
        self._known = {id(tensor) for bucket in buckets for tensor in bucket}
        self._warm_up: GradientAggregation | None = None
        self._set_warm_up()
        self._rounds = Rounds(config.period, config.fragments, config.overlap_steps)
        self._num_participants = number_of_participants(config.participation, world_size)
        self._flights: dict[int, Flight] = {}

    @property
    def num_rounds(self) -> int:
        """Number of periods that have ended."""
        return max(0, self.num_steps - self._config.warmup_steps) // self._config.period

    def average_gradients(self) -> bool:
        """Averages the gradients in the warm-up; a collective call then.

        Returns:
            Whether the gradient of some rank is not finite; False after the warm-up.

        Raises:
            RuntimeError: the optimizer has got parameters that are not averaged; some rank is about to consolidate the
                weights; or a peer is lost.
        """
        if self._warm_up is None:
            return False
        if any(id(p) not in self._known and p.requires_grad for p in parameters_of(self._optimizer)):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} has got further parameters in the warm-up, whose gradients are "
                "not averaged: set warmup_steps=0, or add them before the training."
            )
        gradients = [p.grad for tensors in self.replicas.tensors for p in tensors if p.grad is not None]
        missing = len(gradients) < sum(map(len, self.replicas.tensors))
        finite = not gradients or bool(torch.stack(foreach_norm(gradients)).isfinite().all())
        flags = self._transport.exchange_flags(MISSING_GRADIENT * missing | NOT_FINITE * (not finite)).wait()
        _raise_if_they_differ([flag & (CONSOLIDATE | LOADED) for flag in flags])
        self._warm_up.average(some_missing=any(flag & MISSING_GRADIENT for flag in flags))
        return any(flag & NOT_FINITE for flag in flags)

    def end_step(self) -> bool:
        """Ends a step: applies averages that are due, and starts others; returns whether a period has ended.

        Raises:
            RuntimeError: the ranks have not taken as many steps; or a peer is lost.
        """
        self.num_steps += 1
        step = self.num_steps - self._config.warmup_steps
        if step <= 0:
            if step == 0:
                self.replicas.agree_on_present()
                self._warm_up = None
            return False
        self.replicas.diverged = True
        overlaps = self._config.overlap_steps > 0
        if overlaps:
            for fragment in self._rounds.applied(step):
                self._apply(fragment)
        for fragment in self._rounds.started(step):
            self._start(fragment, round_=(step - 1) // self._config.period)
            if not overlaps:
                self._apply(fragment)
        ended = step % self._config.period == 0
        if ended and self._config.average_optimizer_states:
            self._average_states()
        if ended and not overlaps and self._config.fragments == 1 and self._config.outer_optimizer != "elastic":
            self.replicas.diverged = False
        return ended

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, after as many steps; settles the averages.

        Raises:
            RuntimeError: they differ; or a peer is lost.
        """
        _raise_if_they_differ(self._transport.exchange_flags(CONSOLIDATE | self.num_steps % STEPS).wait())
        self.settle()

    def settle(self) -> None:
        """Waits for the averages under way, and moves them out of the buffers, which others may use."""
        for fragment, flight in self._flights.items():
            if not flight.results:
                self._wait(fragment, flight)
                with torch.inference_mode(False):
                    flight.results = [self.replicas.result(index).clone() for index in self._fragments[fragment]]

    def drop_flights(self) -> None:
        """Drops the averages under way: training continues from consolidated weights."""
        for fragment in list(self._flights):
            self._apply(fragment, own_share=1.0)

    def state_dict(self) -> dict[str, Any]:
        """Returns optimizer state, this rank's replica, the outer optimizer's state, and averages under way."""
        self.settle()
        return {
            "optimizer": self._optimizer.state_dict(),
            "replicas": self.replicas.state_dict(),
            "steps": self.num_steps,
            "flights": {fragment: to_cpu(flight.results) for fragment, flight in self._flights.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""
        self.settle()
        self._optimizer.load_state_dict(state["optimizer"])
        self.replicas.load_state_dict(state["replicas"])
        self.num_steps = state["steps"]
        self._set_warm_up()
        flights = state["flights"] if self._config.overlap_steps else {}
        self._flights = {fragment: Flight(results=results) for fragment, results in flights.items()}

    def _start(self, fragment: int, round_: int) -> None:
        chosen: list[int] | None = None
        if self._num_participants < self._transport.world_size:
            chosen = participants(self._num_participants, self._transport.world_size, round_)
        flight = Flight(self._transport.exchange_flags(self.num_steps % STEPS))
        if not self._config.overlap_steps:  # otherwise nobody waits yet
            self._check(flight)
        flight.handles = [self.replicas.start(index, chosen) for index in self._fragments[fragment]]
        self._flights[fragment] = flight

    def _set_warm_up(self) -> None:
        warming_up = self.num_steps < self._config.warmup_steps
        self._warm_up = GradientAggregation(self._buckets, self._transport, "none", False) if warming_up else None

    def _wait(self, fragment: int, flight: Flight) -> None:
        """Blocks until the average has arrived, on which all ranks then agree."""
        self._check(flight)
        for handle, index in zip(flight.handles, self._fragments[fragment], strict=True):
            handle.wait()
            self.replicas.agree_on_average(index)

    def _check(self, flight: Flight) -> None:
        if flight.flags is not None:
            _raise_if_they_differ(flight.flags.wait())
            flight.flags = None

    def _apply(self, fragment: int, own_share: float | None = None) -> None:
        if (flight := self._flights.pop(fragment, None)) is None:
            return  # dropped, or before the first of its averages
        if own_share is None:
            own_share = self._config.own_share if self._config.overlap_steps else 0.0
        if flight.results:
            for index, result in zip(self._fragments[fragment], flight.results, strict=True):
                self.replicas.result(index).copy_(result)
        else:
            self._wait(fragment, flight)
        for index in self._fragments[fragment]:
            self.replicas.apply(index, own_share)

    def _average_states(self) -> None:
        """Averages the optimizer states that all ranks have; counters of steps stay."""
        states = {
            (index, kind): value
            for index, parameter in enumerate(parameters_of(self._optimizer))
            for kind, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.is_floating_point()
        }
        everywhere = set.intersection(*(set(names) for names in self._transport.gather_objects(list(states))))
        shared = [states[name] for name in sorted(everywhere)]
        exchange_fused(shared, self._config.bucket_mb, lambda flat: self._transport.all_reduce(flat, mean=True))


def _fragments(parameters: Sequence[NamedParameter], number: int) -> list[list[NamedParameter]]:
    """Divides parameters by layers."""
    layers = [list(members) for _, members in groupby(parameters, key=lambda parameter: parameter.layer)]
    if len(layers) < number:
        raise ValueError(f"fragments={number!r} is more than the {len(layers)} layers with parameters of an optimizer.")
    sizes = [sum(map(num_bytes, layer)) for layer in layers]
    return [[p for index in indices for p in layers[index]] for indices in in_fragments(sizes, number)]


def _raise_if_they_differ(flags: Sequence[int]) -> None:
    """Raises if ranks have taken other numbers of steps, or only some are about to consolidate the weights."""
    if len(set(flags)) == 1:
        return
    raise_if_not_all_loaded(flags)
    raise_if_not_all_consolidate(flags, CONSOLIDATE)
    others = [rank for rank, flag in enumerate(flags) if flag != flags[0]]
    raise RuntimeError(
        f"Rank {', '.join(map(str, others))} and rank 0 have not taken as many steps: all ranks take a step, or none."
    )
