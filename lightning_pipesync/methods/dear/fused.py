"""All buckets of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, plan_buckets
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.bucket import FusedBucket
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.order import ExecutionOrder
from lightning_pipesync.methods.dear.parts import Parts, hand_over

V = TypeVar("V")


class FusedBuckets:
    """Which parameters travel together, and in which order; there are no buckets before the first :meth:`plan`.

    Iterating over it yields the buckets in the order in which their gradients become ready.

    Args:
        order: what is known of their order.
        optimizers: the user's own.
        config: the settings.
        transport: the way to the other ranks.
    """

    def __init__(
        self,
        order: ExecutionOrder,
        optimizers: Sequence[Optimizer],
        config: DeARConfig,
        transport: Transport,
    ) -> None:
        self._order, self._optimizers = order, optimizers
        self._config, self._transport = config, transport
        self._parameters: Sequence[NamedParameter] = ()
        self._buckets: list[FusedBucket] = []
        self._in_feeding_order: list[FusedBucket] = []
        self._ready: Sequence[NamedParameter] = ()  # in the order of their gradients
        self._needed: Sequence[str] = ()  # names, in the order of the forward pass
        self._bucket_of: dict[int, FusedBucket] = {}
        self._buckets_of: dict[nn.Module, list[FusedBucket]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[FusedBucket]:
        return iter(self._buckets)

    def __getitem__(self, position: slice) -> list[FusedBucket]:
        return self._buckets[position]

    def with_parameter(self, parameter: Tensor) -> FusedBucket | None:
        """Returns the bucket of a parameter; None if no optimizer has it."""
        return self._bucket_of.get(id(parameter))

    def needed_by(self, module: nn.Module) -> Sequence[FusedBucket]:
        """Returns the buckets of the parameters that the module itself registers."""
        return self._buckets_of.get(module, ())

    def of_optimizer(self, index: int) -> list[FusedBucket]:
        """Returns the buckets of an optimizer, in the order in which the forward pass needs them."""
        return [bucket for bucket in self._in_feeding_order if bucket.group[0] == index]

    def begin_anew(self, parameters: Sequence[NamedParameter]) -> None:
        """Gives up the buckets, if there are any, and takes ``parameters`` into the next ones."""
        self.release()
        self._parameters = parameters

    def plan(self, fusion: Fusion) -> None:
        """Fuses the parameters in the order that the first step has shown; a collective call."""
        self._ready, self._needed = self._order.agree(self._parameters, self._transport)
        self._fuse(self.divide(fusion))

    def divide(self, fusion: Fusion) -> list[list[NamedParameter]]:
        """Returns which parameters would travel together."""
        return plan_buckets(self._ready, fusion)

    def names(self, fusion: Fusion) -> tuple[tuple[str, ...], ...]:
        """Returns the names of what would travel together, bucket by bucket."""
        return _names(self.divide(fusion))

    def is_other(self, fusion: Fusion) -> bool:
        """Returns whether other parameters than now would travel together."""
        return self.names(fusion) != _names(bucket.members for bucket in self._buckets)

    def replan(self, fusion: Fusion) -> None:
        """Fuses the parameters anew, and carries over exactly what is kept for each; a collective call.

        Nothing may be under way.
        """
        states = _joined(bucket.update.states() for bucket in self._buckets)
        residuals = _joined(bucket.residuals_of_shard() for bucket in self._buckets)
        residuals_of_gradients = _joined(bucket.residuals_of_gradients() for bucket in self._buckets)
        updated, owned = self._by_rank(FusedBucket.parts_to_update), self._by_rank(FusedBucket.parts_in_shard)
        self.release()
        self._transport.release_memory()
        self._fuse(self.divide(fusion))
        states = hand_over(states, updated, self._by_rank(FusedBucket.parts_to_update), self._transport)
        residuals = hand_over(residuals, owned, self._by_rank(FusedBucket.parts_in_shard), self._transport)
        for bucket in self._buckets:
            bucket.update.take_states(states)
            bucket.take_residuals(residuals, residuals_of_gradients)

    def optimizer_states(self, index: int) -> dict[Tensor, dict[str, Any]]:
        """Returns what an optimizer would keep for its parameters without DeAR; a collective call."""
        buckets = self.of_optimizer(index)
        old = self._by_rank(FusedBucket.parts_to_update, buckets)
        whole = [_joined(bucket.whole() for bucket in buckets)] * self._transport.world_size
        states = hand_over(_joined(bucket.update.states() for bucket in buckets), old, whole, self._transport)
        return {
            member.tensor: {
                kind: _copied(value, member.tensor, flat=bucket.sharded) for kind, value in states[member.name].items()
            }
            for bucket in buckets
            for member in bucket.members
            if member.name in states
        }

    def release(self) -> None:
        """Gives the parameters memory of their own again."""
        for bucket in self._buckets:
            bucket.release()
        self._buckets, self._in_feeding_order = [], []
        self._bucket_of = {}
        self._buckets_of = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what travels together, in which order, and the state of each bucket on this rank."""
        return {
            "ready": [parameter.name for parameter in self._ready],
            "needed": self._needed,
            "plan": [[member.name for member in bucket.members] for bucket in self._buckets],
            "buckets": [bucket.state_dict() for bucket in self._buckets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank."""
        self.release()
        by_name = {parameter.name: parameter for parameter in self._parameters}
        self._ready, self._needed = [by_name[name] for name in state["ready"]], state["needed"]
        self._fuse([[by_name[name] for name in names] for names in state["plan"]])
        for bucket, saved in zip(self._buckets, state["buckets"], strict=True):
            bucket.load_state_dict(saved)

    def _fuse(self, plan: Sequence[Sequence[NamedParameter]]) -> None:
        self._buckets = [FusedBucket(members, self._optimizers, self._config, self._transport) for members in plan]
        place = {name: i for i, name in enumerate(self._needed)}
        self._in_feeding_order = sorted(self._buckets, key=lambda b: min(place[member.name] for member in b.members))
        self._bucket_of = {id(member.tensor): bucket for bucket in self._buckets for member in bucket.members}
        for module in self._order.modules:
            own = (self._bucket_of.get(id(parameter)) for parameter in module.parameters(recurse=False))
            self._buckets_of[module] = list(dict.fromkeys(bucket for bucket in own if bucket is not None))

    def _by_rank(
        self, parts_of: Callable[[FusedBucket, int], Parts], buckets: Sequence[FusedBucket] | None = None
    ) -> list[Parts]:
        """Returns for each rank which parts of the parameters of some buckets, all if None, it has."""
        buckets = self._buckets if buckets is None else buckets
        return [_joined(parts_of(bucket, rank) for bucket in buckets) for rank in range(self._transport.world_size)]


def _names(plan: Iterable[Sequence[NamedParameter]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(member.name for member in members) for members in plan)


def _joined(mappings: Iterable[Mapping[str, V]]) -> dict[str, V]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def _copied(value: Any, parameter: Tensor, flat: bool) -> Any:
    """Returns a copy of what is kept for a whole parameter; in its shape, if shards of it were put together."""
    if not isinstance(value, Tensor):
        return value
    copy = value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
    return copy.view(parameter.shape) if flat and copy.dim() else copy
