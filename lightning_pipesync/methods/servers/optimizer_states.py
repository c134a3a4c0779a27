"""The users' optimizers, whose states the servers have, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.guarded_states import at_hand, bring_back, send_away
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.gradients.bucket_update import gather_states, whole_states
from lightning_pipesync.methods.servers.shards import ServedShard, SharedBucket


class ServedOptimizers:
    """The states of the users' optimizers that run on the servers.

    ``ask_servers`` returns what each server has kept of an optimizer's state, without a collective call. It is None if
    training does not survive the loss of a rank, so that collective calls are allowed.

    Attributes:
        optimizers: the optimizers.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[SharedBucket],
        shards: Sequence[ServedShard],
        num_servers: int,
        transport: Transport,
        ask_servers: Callable[[int], list[dict[str, Any]]] | None,
    ) -> None:
        self.optimizers, self._buckets, self._shards = tuple(optimizers), buckets, shards
        self._num_servers, self._transport, self._ask_servers = num_servers, transport, ask_servers
        self._kept: list[dict[str, Any]] = [{} for _ in self.optimizers]
        self._clear()

    def read_loaded(self, weights: bool, optimizers: Sequence[Optimizer]) -> None:
        """Copies what was loaded to this rank's shards: the weights, if so, and the states of ``optimizers``."""
        for shard in self._shards:
            if weights:
                shard.read_weights()
            if any(self.optimizers[shard.bucket.group[0]] is loaded for loaded in optimizers):
                shard.update.read_states()
        self._clear()

    def keep(self) -> None:
        """Keeps a copy of this server's part of all states, on the host, for ranks that ask for it later."""
        if self._ask_servers is not None:
            self._kept = [map_tensors(_on_host, self._part(index)) for index, _ in enumerate(self.optimizers)]

    def kept(self, index: int) -> dict[str, Any]:
        """Returns what :meth:`keep` has kept of an optimizer's state, by parameter name."""
        return self._kept[index]

    def state_dict_of(self, index: int) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` would be without servers; collective without ``ask_servers``."""
        optimizer, states = self.optimizers[index], self._states_of(index)
        with at_hand(optimizer) as present:
            present.update(states)
            try:
                return optimizer.state_dict()
            finally:
                present.clear()

    def restore_states(self, but: Sequence[Optimizer]) -> None:
        """Sets the whole state of all optimizers ``but`` some; collective without ``ask_servers``."""
        for index, optimizer in enumerate(self.optimizers):
            if all(optimizer is not other for other in but):
                states = self._states_of(index)
                bring_back(optimizer)
                optimizer.state.update(states)

    def bring_back(self) -> None:
        """Lets the optimizers have states of their own again, of which :meth:`restore_states` may have set any."""
        for optimizer in self.optimizers:
            bring_back(optimizer)

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            with at_hand(optimizer) as states:
                states.clear()
            send_away(optimizer, "The servers have")

    def _states_of(self, index: int) -> dict[Tensor, dict[str, Any]]:
        """Returns the states of whole parameters; collective without ``ask_servers``."""
        buckets = [bucket for bucket in self._buckets if bucket.group[0] == index]
        if self._ask_servers is None:
            places = [
                {name: place for bucket in buckets for name, place in bucket.slices(rank).items()}
                for rank in range(self._num_servers)
            ]
            nothing: list[dict[str, slice]] = [{}] * (self._transport.world_size - self._num_servers)
            states = gather_states(self._part(index), [*places, *nothing], self._transport)
        else:
            states = _joined(self._ask_servers(index))
        return whole_states(states, chain.from_iterable(bucket.members for bucket in buckets))

    def _part(self, index: int) -> dict[str, dict[str, Any]]:
        """Returns this server's part of an optimizer's state, by parameter name."""
        shards = [shard for shard in self._shards if shard.bucket.group[0] == index]
        return {name: state for shard in shards for name, state in shard.update.states().items()}


def _on_host(value: Tensor) -> Tensor:
    """Returns a copy of a state's values; that of a counter stays on its device, as fused optimizers need it."""
    return value.to("cpu", copy=True) if value.dim() else value.clone()


def _joined(parts: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns states of whole parameters, from those of each server's slices of them; a counter is the same in all."""
    states: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, state in part.items():
            before = states.get(name, {})
            states[name] = {
                kind: torch.cat([before[kind], value])
                if before and isinstance(value, Tensor) and value.dim()
                else value
                for kind, value in state.items()
            }
    return states
