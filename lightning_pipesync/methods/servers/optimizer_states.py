"""The users' optimizers, whose states the servers have, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.torch_private import map_tensors
from lightning_pipesync.methods.gradients.reshard import reshard, whole_state
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.shards import ServedShard, SharedBucket


class ServedOptimizers:
    """The states of optimizers that run on the servers; those of EASGD run on the learners, and keep theirs.

    Args:
        optimizers: the user's own.
        buckets: the parameters.
        shards: this rank's shards of them, if it is a server.
        config: the settings.
        transport: the way to the other ranks.
        ask_servers: returns, given an optimizer's index, by server what that one has kept of its state.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[SharedBucket],
        shards: Sequence[ServedShard],
        config: ParameterServerConfig,
        transport: Transport,
        ask_servers: Callable[[int], list[dict[str, Any]]],
    ) -> None:
        self._optimizers = () if config.policy == "easgd" else tuple(optimizers)
        self._buckets, self._shards = buckets, shards
        self._config, self._transport = config, transport
        self._num_servers = config.num_servers(transport.world_size)
        self._ask_servers = ask_servers if config.survives_loss(transport.world_size) else None
        self._kept: list[dict[str, Any]] = [{} for _ in self._optimizers]
        self._clear()

    def read_loaded(self) -> None:
        """Gives this rank's shards the weights, and the optimizers' states, that were loaded."""
        for shard in self._shards:
            shard.read_weights()
            if self._optimizers and self._optimizers[shard.bucket.group[0]].state:
                shard.update.read_states()
        self._clear()

    def keep(self) -> None:
        """Keeps a copy of this server's part of all states, for those who ask for it later, if ranks may be lost."""
        if self._ask_servers is not None:
            self._kept = [map_tensors(torch.clone, self._own(index)) for index, _ in enumerate(self._optimizers)]

    def kept(self, index: int) -> dict[str, Any]:
        """Returns what :meth:`keep` has kept of an optimizer's state, by the name of a parameter."""
        return self._kept[index]

    def state_dict_of(self, index: int) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` would be without servers; collective, unless ranks may be lost."""
        optimizer = self._optimizers[index]
        optimizer.state.update(self._states_of(index))
        try:
            return optimizer.state_dict()
        finally:
            optimizer.state.clear()

    def restore_states(self) -> None:
        """Sets the whole state of the optimizers; collective, unless ranks may be lost."""
        for index, optimizer in enumerate(self._optimizers):
            optimizer.state.update(self._states_of(index))

    def _clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _states_of(self, index: int) -> dict[Tensor, dict[str, Any]]:
        """Returns an optimizer's state by whole parameter."""
        buckets = [bucket for bucket in self._buckets if bucket.group[0] == index]
        if self._ask_servers is None:
            states = self._of_all_servers(self._own(index), buckets)
        else:
            states = _joined(self._ask_servers(index))
        return {
            member.tensor: {kind: whole_state(value, member.tensor) for kind, value in states[member.name].items()}
            for bucket in buckets
            for member in bucket.members
            if member.name in states
        }

    def _own(self, index: int) -> dict[str, dict[str, Any]]:
        """Returns this server's part of an optimizer's state."""
        shards = [shard for shard in self._shards if shard.bucket.group[0] == index]
        return {name: state for shard in shards for name, state in shard.update.states().items()}

    def _of_all_servers(
        self, own: Mapping[str, dict[str, Any]], buckets: Sequence[SharedBucket]
    ) -> dict[str, dict[str, Any]]:
        """Returns states of whole parameters by name, from those of this rank's shards; a collective call."""
        world_size = self._transport.world_size
        of_server = [
            {name: place for bucket in buckets for name, place in bucket.slices(server).items()}
            for server in range(self._num_servers)
        ]
        old: list[dict[str, slice]] = [*of_server, *({} for _ in range(world_size - self._num_servers))]
        members = [member for bucket in buckets for member in bucket.members]
        whole = {member.name: slice(0, member.tensor.numel()) for member in members}
        return reshard(own, old, [whole] * world_size, self._transport)


def _joined(parts: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns states of whole parameters, from those of each server's slices of them."""
    states: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, state in part.items():
            before = states.setdefault(name, state)
            if before is not state:
                states[name] = {kind: _one_after(before[kind], value) for kind, value in state.items()}
    return states


def _one_after(before: Any, value: Any) -> Any:
    """Returns the values of two neighbouring slices; a counter is the same for both."""
    return torch.cat([before, value]) if isinstance(value, Tensor) and value.dim() else value
