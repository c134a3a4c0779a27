"""What replicas that come and go need of a method: snapshots, other members, and what a new one gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipesync.core.comm.line import Line
from lightning_pipesync.core.consistency import describe, describe_optimizers, raise_if_different
from lightning_pipesync.core.parameters import NamedParameter, load_optimizer_state
from lightning_pipesync.core.torch_private import foreach_copy_
from lightning_pipesync.methods.replicas.method import Changes, ReplicaMethod
from lightning_pipesync.methods.replicas.resumed import Part, goes_on, tell_part
from lightning_pipesync.methods.replicas.snapshot import Snapshot, resharded, whole_state, zeroed


class Stateful(Protocol):
    """What has a state, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class RegroupedReplicaMethod(ReplicaMethod):
    """A replica method that can undo a round, go on with other replicas, and hand over to new ones.

    :class:`Sections` says when. A checkpoint of a replica with ``lighthouse`` has its part of the outer state alone.
    """

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        super()._attach(parameters)
        self._resumed: Part | None = None  # of which a checkpoint was, until the first step
        self._handed: dict[str, Stateful] = {}  # what is handed over besides this method's state
        self._received: dict[str, dict[str, Any]] = {}  # of that what nobody has asked for yet
        self._waiting: list[int] = []  # ranks of new replicas that wait for it

    @property
    def num_steps(self) -> int:
        """Number of steps of the first optimizer since the start of the training, also before this process started."""
        return self._units[0].num_steps

    @property
    def steps_of_optimizers(self) -> list[int]:
        """Number of steps of each optimizer, in the same way."""
        return [unit.num_steps for unit in self._units]

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the first optimizer."""
        return self._units[0].num_rounds

    def launch(self) -> None:
        """Sends what averages that have started in a section send under the next steps."""
        for unit in self._units:
            unit.launch()

    def settle(self) -> None:
        """Waits for the averages under way."""
        for unit in self._units:
            unit.settle()

    def undo_averages(self) -> None:
        """Restores the tensors that no optimizer updates; not a collective call."""
        self._non_trainable.undo_average()

    # --- other replicas --------------------------------------------------------------------------------------------

    def snapshot(self, of_step: int | None = None) -> Snapshot:
        """Returns the state, or of weights only what the end of the next step of an optimizer may change."""
        if of_step is None:
            units = [unit.snapshot() for unit in self._units]
        else:
            units = [unit.snapshot(unit.changed_next if i == of_step else ()) for i, unit in enumerate(self._units)]
        return Snapshot(*self._place, replace(self._changes), units)

    def completed(self, snapshot: Snapshot) -> Snapshot:
        """Returns a snapshot with the present weights in place of those that it lacks, as they have not changed."""
        units = [unit.completed(saved) for unit, saved in zip(self._units, snapshot.units, strict=True)]
        return replace(snapshot, units=units)

    def gathered_snapshot(self, keeper: int) -> Snapshot:
        """Returns a snapshot with the outer state of all shards, which rank ``keeper`` has alone; a collective call."""
        rank, world_size = self._place

        def gathered(numel: int, outer: Any) -> Any:
            whole = whole_state(rank, world_size, self.transport, numel, outer)
            return whole if rank == keeper else zeroed(numel, whole)

        return replace(self.snapshot().with_outer_states(gathered), rank=0, world_size=1)

    def regroup(self, line: Line, snapshot: Snapshot, first: int, new: Sequence[int]) -> None:
        """Continues from ``snapshot`` with the replicas of ``line``, on which it exchanges; a collective call of them.

        The ranks ``new`` of it continue from the snapshot of ``first``. Averages under way are dropped, and a lossy
        codec's residuals start at zero.
        """
        self._waiting = []
        is_new = line.rank in new
        if is_new:
            snapshot = self._take_over(self.transport.receive_state(first), first)
        elif line.rank == first and new:
            handover = self._handover(snapshot)
            for rank in new:
                self.transport.send_state(handover, rank)
            self._waiting = list(new)
            if self._resumed is not None:
                tell_part(self.transport, self._resumed)
        present = snapshot.with_outer_states(partial(resharded, snapshot.rank, snapshot.world_size, self.transport))
        # All have arrived: if one is lost before, the units stay as they are.
        for unit in self._units:
            unit.close()
        self._units, self._place = self._new_units(), (line.rank, line.size)
        for unit, saved in zip(self._units, present.units, strict=True):
            unit.restore(saved)
        self._changes = replace(snapshot.changes)
        if new:
            self._resumed = None

    # --- what is handed over ----------------------------------------------------------------------------------------

    def hand_over(self, **parts: Stateful) -> None:
        """Adds ``parts``, such as a scheduler, to what a new replica gets from another one: their ``state_dict()``.

        It is taken at the beginning of a step. In a replica that is new the state is loaded at once.
        """
        self._handed |= parts
        for name in self._received.keys() & parts.keys():
            parts[name].load_state_dict(self._received.pop(name))

    def send_rest(self) -> None:
        """Sends new replicas what is handed over besides the method's state, as it is between two steps.

        Hyper-parameters are too: a scheduler has changed them since the round.
        """
        if not self._waiting:
            return
        rest = {
            "parts": {name: part.state_dict() for name, part in self._handed.items()},
            "groups": [
                [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ],
        }
        while self._waiting:
            self.transport.send_state(rest, self._waiting.pop())

    def receive_rest(self, first: int) -> None:
        """Receives from a replica what it hands over besides the method's state."""
        rest = self.transport.receive_state(first)
        self._received = rest["parts"]
        self.hand_over(**self._handed)
        for optimizer, groups in zip(self.optimizers, rest["groups"], strict=True):
            for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
                group.update(hyperparameters)

    def _handover(self, snapshot: Snapshot) -> dict[str, Any]:
        """Returns what a replica that is new gets from this one."""
        return {
            "described": self._described(begins=not self.num_steps),
            "tensors": [tensor.detach() for tensor in self._all_tensors()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.data.position(),
            "resumed": self._resumed,
            "snapshot": {**vars(snapshot), "changes": asdict(snapshot.changes)},
        }

    @torch.no_grad()
    def _take_over(self, handover: dict[str, Any], first: int) -> Snapshot:
        """Takes over the state of replica ``first``; returns the snapshot to continue from.

        Keeps its own, if both have loaded what they had after the same step.

        Raises:
            ValueError: this replica has other settings, or another model.
        """
        units, own = handover["snapshot"]["units"], self.snapshot()
        begins = not units[0]["steps"][0]
        raise_if_different(handover["described"], self._described(begins), self.transport.rank)
        if handover["resumed"]:
            is_same = [unit["steps"] for unit in units] == [unit["steps"] for unit in own.units]
            part = self._resumed if is_same else None
            if goes_on(self.transport, part, tuple(handover["resumed"]), first):
                self.data.go_to(handover["data"])
                return own
        foreach_copy_(self._all_tensors(), handover["tensors"])
        for optimizer, state in zip(self.optimizers, handover["optimizers"], strict=True):
            load_optimizer_state(optimizer, state)
        self._non_trainable.mark_common()
        self.data.go_to(handover["data"])
        saved = handover["snapshot"]
        return Snapshot(**{**saved, "changes": Changes(**saved["changes"])}).with_outer_states(zeroed)

    def _described(self, begins: bool) -> list[tuple[str, str]]:
        """Describes what all replicas have in common: hyper-parameters only when the training begins."""
        classes, hyperparameters = describe_optimizers(self.optimizers)
        return [
            *describe(self.config, self._parameters, self._module),
            *classes,
            *(hyperparameters if begins else []),
        ]

    def _all_tensors(self) -> list[Tensor]:
        return [*(parameter.tensor for parameter in self._parameters), *self._read_buffers()]

    # --- state ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`ReplicaMethod.load_state_dict`; with ``lighthouse`` before :meth:`join`."""
        super().load_state_dict(state)
        if self.config.lighthouse is not None:
            self._place = self._resumed = tuple(state["place"])

    def _check_place(self, rank: int, world_size: int) -> None:
        if self.config.lighthouse is None:  # otherwise the outer state is divided anew
            super()._check_place(rank, world_size)
