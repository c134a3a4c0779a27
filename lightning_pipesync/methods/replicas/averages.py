"""An optimizer's parameters, averaged over the replicas fragment by fragment, and their averages under way."""

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
from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.methods.replicas.flags import (
    CONSOLIDATE,
    SAME_STARTS,
    SAME_STEPS,
    STEPS,
    STEPS_AT_START,
    check_same,
    exchange_flags,
)
from lightning_pipesync.methods.replicas.groups import ReplicaGroups, replicas_of
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.methods.replicas.weights import Weights, to_cpu


@dataclass
class PendingAverage:
    """An average of a fragment that has started and is not applied yet."""

    due: int  # the step at whose end it is applied
    ranks: Sequence[int] | None = None  # of which it is; None: all
    flags: Handle[list[int]] | None = None  # of all ranks; None once they are checked
    handles: Sequence[Handle[Tensor]] = ()
    results: Sequence[Tensor] = ()  # once they have been moved out of the buffers
    starts: Sequence[Tensor] = ()  # this rank's weights when it started, if their progress since then is to stay


class Averages:
    """Averages an optimizer's parameters fragment by fragment. One average of a fragment is under way at a time.

    Attributes:
        buckets: their weights, with all buckets of an average in flight at the same time.
        diverged: whether the replicas may differ, the same on all ranks; set by the owner after a local step.

    Raises:
        ValueError: there are fewer layers than fragments.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[NamedParameter], config: ReplicaSettings, transport: Transport
    ) -> None:
        self._config, self._transport, self._replicas = config, transport, replicas_of(transport)
        outer = config.outer_step(optimizer, self._replicas.world_size)
        self._elastic_force = config.elastic_force_of(self._replicas.world_size)
        self._fragments: list[list[Weights]] = []
        for fragment in _divided(parameters, config.fragments):
            plan = plan_buckets(fragment, Fusion(bucket_mb=config.bucket_mb))
            tensors = [[parameter.tensor for parameter in bucket] for bucket in plan]
            self._fragments.append([Weights(t, transport, config, outer, self._elastic_force) for t in tensors])
        self.buckets = [bucket for fragment in self._fragments for bucket in fragment]
        self.diverged = False
        self._pending: dict[int, PendingAverage] = {}
        self.set_global()

    # --- averages of fragments --------------------------------------------------------------------------------------

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

        What is exchanged at the end of a round would wait behind them.
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
        """Moves the starts of the averages under way as the weights were by the values that are swapped in.

        So what a flush that is not undone has moved the weights by is no progress of this rank's.
        """
        for fragment, pending in self._pending.items():
            for bucket, start in zip(self._fragments[fragment], pending.starts, strict=False):
                bucket.move_as_swapped(start)
            self.diverged |= bool(pending.starts)  # once it is applied: ranks differ by their progress

    def changed_by(self, step: int) -> list[Weights]:
        """Returns the buckets that the end of a step may change: of averages that are due, and without overlap all."""
        if not self._config.overlap_steps:
            return self.buckets
        return [b for fragment, p in self._pending.items() if p.due == step for b in self._fragments[fragment]]

    def _launch(self, fragment: int, pending: PendingAverage) -> None:
        overlap, buckets = self._config.overlap_steps, self._fragments[fragment]
        if self._config.compares_steps:
            pending.flags = self._transport.exchange_flags((pending.due - overlap) % STEPS_AT_START)
        if not overlap:  # with overlap nobody waits yet
            self._check(pending)
        if overlap and self._config.mixing_factor == "progress":
            pending.starts = [bucket.packed().clone() for bucket in buckets]
        with profiled("start average of fragment", fragment):
            pending.handles = [bucket.start(pending.ranks, background=overlap > 0) for bucket in buckets]

    def _settle(self, fragment: int, pending: PendingAverage) -> None:
        if not pending.results:
            self._wait(fragment, pending)
            with torch.inference_mode(False):
                pending.results = [bucket.result.clone() for bucket in self._fragments[fragment]]

    def _wait(self, fragment: int, pending: PendingAverage) -> None:
        """Waits for an average, and updates the global values: all of them, or none if a peer is lost."""
        self._check(pending)
        for handle in pending.handles:
            handle.wait()
        for bucket in self._fragments[fragment]:
            bucket.update_global()

    def _check(self, pending: PendingAverage) -> None:
        if pending.flags is not None:
            check_same(pending.flags.wait(), SAME_STARTS, ranks=self._transport.ranks)
            pending.flags = None

    def _apply(self, fragment: int) -> None:
        mixing_factor = self._config.mixing_factor if self._config.overlap_steps else 0.0
        with profiled("apply average of fragment", fragment):
            starts = self._arrive(fragment).starts
            for place, bucket in enumerate(self._fragments[fragment]):
                if mixing_factor != "progress":
                    bucket.apply(mixing_factor)
                elif starts:
                    bucket.add_progress(starts[place])
                else:  # it was saved by a run with a number for mixing_factor
                    bucket.apply()

    def _arrive(self, fragment: int) -> PendingAverage:
        """Ends an average; its results are in the buffers then."""
        pending = self._pending.pop(fragment)
        if pending.results:
            for bucket, result in zip(self._fragments[fragment], pending.results, strict=True):
                bucket.result.copy_(result)
        else:
            self._wait(fragment, pending)
        return pending

    # --- consolidated weights ---------------------------------------------------------------------------------------

    def set_global(self) -> None:
        """Sets the global values to the present ones, which are the same on all ranks."""
        for bucket in self.buckets:
            bucket.set_global()

    def reset_global(self) -> None:
        """Sets the global values to the present ones, or to their average if ranks differ; a collective call.

        What the codec had not sent of the former ones is dropped.
        """
        if all(bucket.global_flat is None for bucket in self.buckets):
            return
        for bucket in self.buckets:
            bucket.drop_residuals()
        if len(set(self._transport.gather_objects(digest([bucket.tensors for bucket in self.buckets])))) > 1:
            self._average_over(self._transport)
        self.set_global()

    def swap_in_average(self) -> None:
        """Sets the tensors to their average, and keeps this rank's values for :meth:`swap_back`; collective.

        With an elastic force, sets them to the global values. Does nothing if the replicas have not diverged.
        """
        if self._elastic_force:
            self.swap_in_global()
        elif self.diverged and not self._is_swapped:
            for bucket in self.buckets:
                bucket.keep_present()
            self._average_over(self._replicas)
            self.diverged = False
            for bucket in self.buckets:
                bucket.average_is_swapped_in()

    def swap_in_global(self) -> None:
        """Sets the tensors to the global values, as :meth:`swap_in_average`; not a collective call."""
        if self.diverged and not self._is_swapped:
            for bucket in self.buckets:
                bucket.swap_in_global()

    def swap_back(self) -> None:
        """Restores this rank's values, except those of tensors that were written to since the swap."""
        self.diverged |= self._is_swapped
        for bucket in self.buckets:
            bucket.swap_back()

    def keep_average(self) -> None:
        """Continues from the average, without the values that :meth:`swap_in_average` has kept."""
        for bucket in self.buckets:
            bucket.keep_average()

    def written_since_swap(self) -> bool:
        """Returns whether tensors were written to since :meth:`swap_in_average`; True if nothing is swapped in."""
        return not self._is_swapped or any(bucket.is_written() for bucket in self.buckets)

    @property
    def _is_swapped(self) -> bool:
        return any(bucket.is_swapped for bucket in self.buckets)

    def _average_over(self, collectives: Transport | ReplicaGroups) -> None:
        """Sets the tensors to their exact average; all of them, or none if a peer is lost."""
        for handle in [collectives.all_reduce(bucket.packed(), mean=True) for bucket in self.buckets]:
            handle.wait()
        for bucket in self.buckets:
            bucket.unpack()

    # --- state ------------------------------------------------------------------------------------------------------

    def snapshot(self, buckets: Container[Weights] | None = None) -> dict[str, Any]:
        """Returns the state as if the averages under way had not started, but for those that are settled.

        Not a collective call.

        Args:
            buckets: those that may change before the snapshot is restored, the others have None; None: all.
        """
        states = [bucket.state_dict() if buckets is None or bucket in buckets else None for bucket in self.buckets]
        return {"buckets": states, "diverged": self.diverged, "flights": self._settled()}

    def completed(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Returns a snapshot with the present state of the buckets that it lacks, as they have not changed."""
        saved = zip(snapshot["buckets"], self.buckets, strict=True)
        return {**snapshot, "buckets": [bucket.state_dict() if state is None else state for state, bucket in saved]}

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
        own = self.diverged or self._is_swapped
        states = [bucket.state_dict(own, residuals=True) for bucket in self.buckets]
        return {"buckets": states, "diverged": own, "flights": self._settled()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what :meth:`state_dict` or :meth:`snapshot` returned on this rank."""
        if not self._config.undoes_averages:
            self.settle()
        self.diverged = state["diverged"]
        for bucket, saved in zip(self.buckets, state["buckets"], strict=True):
            bucket.keep_average()
            bucket.load_state_dict(saved)
        pending = state["flights"] if self._config.overlap_steps else {}
        self._pending = {fragment: PendingAverage(**saved) for fragment, saved in pending.items()}

    def _settled(self) -> dict[int, dict[str, Any]]:
        return {
            fragment: {"due": pending.due, "results": to_cpu(pending.results), "starts": to_cpu(pending.starts)}
            for fragment, pending in self._pending.items()
            if pending.results
        }


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
