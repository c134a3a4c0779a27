"""All buckets of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import plan_buckets
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.bucket import FusedBucket
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.full_state import full_states
from lightning_pipesync.methods.dear.order import ExecutionOrder


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
        self._feeding_order: list[int] = []
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
        buckets = (self._buckets[position] for position in self._feeding_order)
        return [bucket for bucket in buckets if bucket.group[0] == index]

    def begin_anew(self, parameters: Sequence[NamedParameter]) -> None:
        """Gives up the buckets, if there are any, and takes ``parameters`` into the next ones."""
        self.release()
        self._parameters = parameters

    def plan(self) -> None:
        """Fuses the parameters in the order that the first step has shown; a collective call."""
        ready, position = self._order.agree(self._parameters, self._transport)
        plan = plan_buckets(ready, self._config.plan())
        first_needed = [min(position[id(member.tensor)] for member in members) for members in plan]
        self._fuse(plan, sorted(range(len(plan)), key=first_needed.__getitem__))

    def return_optimizer_states(self) -> None:
        """Gives the optimizers the state back that the buckets keep; a collective call."""
        for index, optimizer in enumerate(self._optimizers):
            optimizer.state.update(self.optimizer_states(index))

    def optimizer_states(self, index: int) -> dict[Tensor, dict[str, Any]]:
        """Returns what an optimizer would keep for its parameters without DeAR; a collective call."""
        return {
            member.tensor: state
            for bucket in self.of_optimizer(index)
            for member, state in zip(bucket.members, full_states(bucket, self._transport), strict=True)
            if state
        }

    def release(self) -> None:
        """Gives the parameters memory of their own again."""
        for bucket in self._buckets:
            bucket.release()
        self._buckets = []
        self._bucket_of = {}
        self._buckets_of = {}

    def shares_memory(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is a view of a bucket's values."""
        storage = tensor.untyped_storage().data_ptr()
        return any(bucket.values.flat.untyped_storage().data_ptr() == storage for bucket in self._buckets)

    def state_dict(self) -> dict[str, Any]:
        """Returns what travels together, and the state of each bucket on this rank."""
        index_of = {id(parameter.tensor): index for index, parameter in enumerate(self._parameters)}
        return {
            "plan": [[index_of[id(member.tensor)] for member in bucket.members] for bucket in self._buckets],
            "feeding_order": self._feeding_order,
            "buckets": [bucket.state_dict() for bucket in self._buckets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank."""
        self.release()
        self._fuse([[self._parameters[index] for index in bucket] for bucket in state["plan"]], state["feeding_order"])
        for bucket, saved in zip(self._buckets, state["buckets"], strict=True):
            bucket.load_state_dict(saved)

    def _fuse(self, plan: Sequence[Sequence[NamedParameter]], feeding_order: Sequence[int]) -> None:
        self._buckets = [FusedBucket(members, self._optimizers, self._config, self._transport) for members in plan]
        self._feeding_order = list(feeding_order)
        self._bucket_of = {id(member.tensor): bucket for bucket in self._buckets for member in bucket.members}
        for module in self._order.modules:
            own = (self._bucket_of.get(id(parameter)) for parameter in module.parameters(recurse=False))
            self._buckets_of[module] = list(dict.fromkeys(bucket for bucket in own if bucket is not None))
