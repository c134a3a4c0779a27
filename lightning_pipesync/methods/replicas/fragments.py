"""The fragments of an optimizer's parameters, and their averages under way."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.methods.replicas.flags import CONSOLIDATE, check_same, exchange_flags
from lightning_pipesync.methods.replicas.groups import replicas_of
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors, to_cpu

#: A rank's flag is the number of its steps modulo this: when it consolidates the weights, and when an average starts.
#: The latter has no bit of SKIPPED, and the flag of a gradient always has one: no flag is taken for another.
STEPS, STEPS_AT_START = 64, 7  # a prime: of policies that disagree, the steps mostly differ by a power of two
SAME_STEPS = "have not taken as many steps: all ranks take a step, or none."
SAME_STARTS = (
    "start an average after different numbers of steps: all ranks must take the same steps, and end_step of their "
    "policy must return the same for each of them."
)


@dataclass
class PendingAverage:
    """An average of a fragment that has started and is not applied yet."""

    due: int  # the step at whose end it is applied
    ranks: Sequence[int] | None = None  # of which it is; None: all
    flags: Handle[list[int]] | None = None  # of all ranks; None once they are checked
    handles: Sequence[Handle[Tensor]] = ()
    results: Sequence[Tensor] = ()  # once they have been moved out of the buffers
    starts: Sequence[Tensor] = ()  # this rank's weights when it started, if their progress since then is to stay


class Fragments:
    """Averages an optimizer's parameters fragment by fragment. One average of a fragment is under way at a time.

    ``replicas`` averages ``buckets``, the parameters of each bucket.

    Raises:
        ValueError: there are fewer layers than fragments.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[NamedParameter], config: ReplicaSettings, transport: Transport
    ) -> None:
        self._config, self._transport = config, transport
        self.buckets: list[list[Tensor]] = []
        self._fragments: list[range] = []  # indices of their buckets
        for fragment in _divided(parameters, config.fragments):
            plan = plan_buckets(fragment, Fusion(bucket_mb=config.bucket_mb))
            self._fragments.append(range(len(self.buckets), len(self.buckets) + len(plan)))
            self.buckets += [[parameter.tensor for parameter in bucket] for bucket in plan]
        number = replicas_of(transport).world_size
        outer, force = config.outer_step(optimizer, number), config.elastic_force_of(number)
        codec, feedback = config.codec_of_weights
        self.replicas = ReplicatedTensors(
            self.buckets,
            transport,
            codec,
            feedback,
            outer,
            elastic_force=force,
            keeps_global_weights=config.undoes_averages,
            neighbors=config.neighbors,
            at_server=config.average == "server",
            residual_decay=config.decay_of_residuals,
        )
        self._pending: dict[int, PendingAverage] = {}

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._pending

    @property
    def is_under_way(self) -> bool:
        return bool(self._pending)

    def start(self, fragment: int, step: int, ranks: Sequence[int] | None) -> None:
        """Starts to average a fragment of ``ranks``, None: all, at the end of a step; without overlap, applies it.

        With neighbors, ``ranks`` are this one and its own.

        Raises:
            RuntimeError: other ranks start it after another number of steps; or a peer is lost.
        """
        overlap = self._config.overlap_steps
        self._pending[fragment] = pending = PendingAverage(step + overlap, ranks)
        if not (overlap and self._config.undoes_averages):
            self._launch(fragment, pending)
        if not overlap:
            self._apply(fragment)

    def launch(self) -> None:
        """Sends what :meth:`start` does not send itself: averages with overlap, if they can be undone.

        What is exchanged at the end of a section would wait behind them.
        """
        for fragment, pending in self._pending.items():
            if not pending.handles and not pending.results:
                self._launch(fragment, pending)

    def apply_due(self, step: int) -> None:
        for fragment in [fragment for fragment, pending in self._pending.items() if pending.due == step]:
            self._apply(fragment)

    def check_consolidation(self, step: int) -> None:
        """Checks that all ranks are about to consolidate the weights, after as many steps; settles the averages."""
        if self._config.compares_steps:
            flags = exchange_flags(self._transport, CONSOLIDATE | step % STEPS)
            check_same(flags, SAME_STEPS, ranks=self._transport.ranks)
        self.settle()

    def settle(self) -> None:
        """Waits for the averages under way, and moves them out of the buffers."""
        for fragment, pending in self._pending.items():
            self._settle(fragment, pending)

    def drop(self) -> None:
        """Drops the averages under way."""
        for fragment in list(self._pending):
            self._arrive(fragment)

    def move_starts(self) -> None:
        """Moves the starts of the averages under way as the weights were by the values that are swapped in."""
        for fragment, pending in self._pending.items():
            for index, start in zip(self._fragments[fragment], pending.starts, strict=False):
                self.replicas.move_as_swapped(index, start)
            self.replicas.diverged |= bool(pending.starts)  # once it is applied: ranks differ by their progress

    def changed_by(self, step: int) -> list[int]:
        """Returns the buckets that the end of a step may change: of averages that are due, and without overlap all."""
        changed = [
            fragment
            for fragment in range(len(self._fragments))
            if not self._config.overlap_steps or (fragment in self and self._pending[fragment].due == step)
        ]
        return [index for fragment in changed for index in self._fragments[fragment]]

    def snapshot(self, buckets: Container[int] | None = None) -> dict[str, Any]:
        """Returns the state as if the averages under way had not started, but for those that are settled.

        Not a collective call.

        Args:
            buckets: those that may change before the snapshot is restored; None: all.
        """
        return {"replicas": self.replicas.snapshot(buckets), "flights": self._settled()}

    def completed(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Returns a snapshot with the present state of the buckets that it lacks."""
        return {**snapshot, "replicas": self.replicas.completed(snapshot["replicas"])}

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's replica, the outer optimizer's state, and the averages under way.

        Without those that do not arrive, once a peer is known to be lost. If averages can be undone, without all that
        are under way, as the others may undo them.
        """
        if self._config.undoes_averages:
            return self.snapshot()
        for fragment, pending in self._pending.items():
            with self._transport.watch.despite_loss():
                self._settle(fragment, pending)
        return {"replicas": self.replicas.state_dict(), "flights": self._settled()}

    def _settled(self) -> dict[int, dict[str, Any]]:
        return {
            fragment: {"due": pending.due, "results": to_cpu(pending.results), "starts": to_cpu(pending.starts)}
            for fragment, pending in self._pending.items()
            if pending.results
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what :meth:`state_dict` or :meth:`snapshot` returned on this rank."""
        if not self._config.undoes_averages:
            self.settle()
        self.replicas.load_state_dict(state["replicas"])
        pending = state["flights"] if self._config.overlap_steps else {}
        self._pending = {fragment: PendingAverage(**saved) for fragment, saved in pending.items()}

    def _launch(self, fragment: int, pending: PendingAverage) -> None:
        overlap, buckets = self._config.overlap_steps, self._fragments[fragment]
        if self._config.compares_steps:
            pending.flags = self._transport.exchange_flags((pending.due - overlap) % STEPS_AT_START)
        if not overlap:  # with overlap nobody waits yet
            self._check(pending)
        if overlap and self._config.mixing_factor == "progress":
            pending.starts = [self.replicas.packed(index).clone() for index in buckets]
        with profiled("start average of fragment", fragment):
            pending.handles = [self.replicas.start(index, pending.ranks, background=overlap > 0) for index in buckets]

    def _settle(self, fragment: int, pending: PendingAverage) -> None:
        if not pending.results:
            self._wait(fragment, pending)
            with torch.inference_mode(False):
                pending.results = [self.replicas.result(index).clone() for index in self._fragments[fragment]]

    def _wait(self, fragment: int, pending: PendingAverage) -> None:
        """Waits for an average, and updates the global values: all of them, or none if a peer is lost."""
        self._check(pending)
        for handle in pending.handles:
            handle.wait()
        for index in self._fragments[fragment]:
            self.replicas.update_global_weights(index)

    def _check(self, pending: PendingAverage) -> None:
        if pending.flags is not None:
            check_same(pending.flags.wait(), SAME_STARTS, ranks=self._transport.ranks)
            pending.flags = None

    def _apply(self, fragment: int) -> None:
        mixing_factor = self._config.mixing_factor if self._config.overlap_steps else 0.0
        with profiled("apply average of fragment", fragment):
            starts = self._arrive(fragment).starts
            for place, index in enumerate(self._fragments[fragment]):
                if mixing_factor != "progress":
                    self.replicas.apply(index, mixing_factor)
                elif starts:
                    self.replicas.add_progress(index, starts[place])
                else:  # it was saved by a run with a number for mixing_factor
                    self.replicas.apply(index)

    def _arrive(self, fragment: int) -> PendingAverage:
        """Ends an average; its results are in the buffers then."""
        pending = self._pending.pop(fragment)
        if pending.results:
            for index, result in zip(self._fragments[fragment], pending.results, strict=True):
                self.replicas.result(index).copy_(result)
        else:
            self._wait(fragment, pending)
        return pending


def divide_layers(sizes: list[int], fragments: int) -> list[list[int]]:
    """Divides layers of ``sizes`` bytes, in order, into fragments of similar sizes; returns the indices of each."""
    total, passed = sum(sizes), 0
    divided: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        left = len(sizes) - index
        full = passed + size / 2 > total * len(divided) / fragments
        if divided[-1] and len(divided) < fragments and (full or left == fragments - len(divided)):
            divided.append([])
        divided[-1].append(index)
        passed += size
    return divided


def _divided(parameters: Sequence[NamedParameter], number: int) -> list[list[NamedParameter]]:
    if number == 1:
        return [list(parameters)]
    layers = [list(members) for _, members in groupby(parameters, key=lambda parameter: parameter.layer)]
    if len(layers) < number:
        raise ValueError(
            f"fragments={number!r} is more than the {len(layers)} layers with parameters of an optimizer."
            f" Set fragments={len(layers)} or less."
        )
    sizes = [sum(map(num_bytes, layer)) for layer in layers]
    return [[p for index in indices for p in layers[index]] for indices in divide_layers(sizes, number)]
