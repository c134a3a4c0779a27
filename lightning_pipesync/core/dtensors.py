"""Sharded parameters: what a method sees of a DTensor is this rank's shard.

[Note: shards in optimizers]
While a method is attached, the optimizers of a sharded model have :class:`LocalShard` as their parameters, which share
memory and gradients with the DTensors. So methods, optimizers and loss scalers work on plain tensors, and FSDP2, which
gathers the parameters and reduces their gradients within a replica, does not notice. What reads an optimizer by the
model's parameters, as ``torch.distributed.checkpoint`` does, needs them back: :meth:`ShardedOptimizers.given_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.guarded_states import at_hand
from lightning_pipesync.core.torch_private import is_dtensor, local_tensor, sharded_like

#: Element-wise optimizers, which can update a shard without the rest.
ELEMENTWISE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, ASGD)

#: Optimizers that step on DTensors as on whole tensors, and whose states are sharded as these are.
OF_DTENSORS: tuple[type[Optimizer], ...] = (Muon,)


class LocalShard(nn.Parameter):
    """This rank's shard of a parameter that is a DTensor: it shares its memory and its gradient.

    Attributes:
        sharded: the DTensor.
        reduced_by_fsdp: whether FSDP2 reduces its gradient, so that this is sharded as the DTensor is.
    """

    sharded: Tensor
    reduced_by_fsdp = True

    def __new__(cls, sharded: Tensor) -> LocalShard:
        shard: LocalShard = torch.Tensor._make_subclass(cls, local_tensor(sharded).detach(), sharded.requires_grad)
        shard.sharded = sharded
        return shard

    @property
    def grad(self) -> Tensor | None:
        gradient = self.sharded.grad
        return None if gradient is None else local_tensor(gradient)

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        self.sharded.grad = None if values is None else sharded_like(self.sharded, values)

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.sharded.requires_grad = requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> LocalShard:
        self.sharded.requires_grad_(requires_grad)
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        return cast(RemovableHandle, self.sharded.register_post_accumulate_grad_hook(lambda _: hook(self)))

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values, as a plain tensor; other memory cannot be set, since FSDP2 has its own reference to this one."""
        return Tensor.detach(self)

    def follow(self) -> None:
        """Shares the memory of the DTensor again, if that has been given another one, as by loading."""
        present = local_tensor(self.sharded)
        if present.data_ptr() != self.data_ptr() or present.shape != self.shape:
            Tensor.data.__set__(self, present.detach())  # type: ignore[attr-defined]


def is_sharded(module: nn.Module) -> bool:
    return any(is_dtensor(parameter) for parameter in module.parameters())


def has_shards(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer has parameters of a sharded model, or this rank's shards of them."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(is_dtensor(whole_of(parameter)) for parameter in parameters)


def local_of(parameter: Tensor) -> Tensor:
    """Returns the :class:`LocalShard` of a DTensor, the same at each call; any other tensor itself."""
    if not is_dtensor(parameter):
        return parameter
    shard: LocalShard | None = vars(parameter).get("_pipesync_shard")
    if shard is None:
        shard = parameter._pipesync_shard = LocalShard(parameter)  # type: ignore[attr-defined]
    return shard


def whole_of(parameter: Tensor) -> Tensor:
    """Returns the DTensor of a :class:`LocalShard`; any other tensor itself."""
    return parameter.sharded if isinstance(parameter, LocalShard) else parameter


@torch.no_grad()
def reduce_gradient(parameter: Tensor) -> None:
    """Completes the gradient of a :class:`LocalShard` that FSDP2 does not reduce; the first hook on its gradient.

    With tensor parallelism a backward pass may leave it as a partial sum, which no method may take for the gradient:
    that of a layer norm whose input is divided, as with ``SequenceParallel``. Then it is summed among the ranks that
    have copies of the parameter. They call this in one order, that of one graph, as the collectives of their layers.
    """
    if isinstance(parameter, LocalShard):
        sharded: Any = parameter.sharded
        if sharded.grad is not None and sharded.grad.placements != sharded.placements:
            sharded.grad = sharded.grad.redistribute(placements=sharded.placements)


@torch.no_grad()
def give_values(parameter: Tensor, values: Tensor) -> None:
    """Makes ``values`` the data of a parameter, without a copy unless it is a :class:`LocalShard`."""
    if isinstance(parameter, LocalShard):
        parameter.copy_(values)
    else:
        parameter.data = values


class ShardedOptimizers:
    """Gives optimizers this rank's shards in place of their parameters, see [Note: shards in optimizers]."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._hooks = [optimizer.register_load_state_dict_post_hook(self._take) for optimizer in optimizers]
        for optimizer in optimizers:
            self._take(optimizer)

    def follow(self) -> None:
        """Follows parameters whose memory has been replaced, see :meth:`LocalShard.follow`, and takes new ones."""
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter in parameters:
                if isinstance(parameter, LocalShard):
                    parameter.follow()
            if any(map(is_dtensor, parameters)):  # of a callback that has unfrozen layers, say
                self._take(optimizer)

    def given_back(self) -> AbstractContextManager[None]:
        """Returns a context in which the optimizers have the model's parameters, and DTensors as their states."""
        return self._of_model(self._optimizers)

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None] | None:
        """Returns the context of a step of one of :data:`OF_DTENSORS`, in which it has the model's own parameters.

        None for other optimizers.
        """
        return self._of_model([optimizer]) if type(optimizer) in OF_DTENSORS else None

    def release(self) -> None:
        """Gives the parameters back for good."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            _give_back(optimizer)

    @contextmanager
    def _of_model(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        for optimizer in optimizers:
            _give_back(optimizer)
        try:
            yield
        finally:
            for optimizer in optimizers:
                self._take(optimizer)

    def _take(self, optimizer: Optimizer) -> None:
        def local_state(value: Any) -> Any:
            return local_tensor(value) if isinstance(value, Tensor) else value

        _replace(optimizer, local_of, lambda _, value: local_state(value))


def _give_back(optimizer: Optimizer) -> None:
    def whole_state(parameter: Tensor, value: Any) -> Any:
        if isinstance(parameter, LocalShard) and isinstance(value, Tensor) and value.shape == parameter.shape:
            return sharded_like(parameter.sharded, value) if value.dim() else value
        return value

    _replace(optimizer, whole_of, whole_state)


def _replace(optimizer: Optimizer, replace: Callable[[Tensor], Tensor], convert: Callable[[Tensor, Any], Any]) -> None:
    # What gathers whole tensors from the states takes them in their order, which has to be the same on all ranks.
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with at_hand(optimizer) as present:
        states = {key: present[key] for key in dict.fromkeys([*in_order, *present]) if key in present}
        for group in optimizer.param_groups:
            group["params"] = [replace(parameter) for parameter in group["params"]]
        present.clear()
        for parameter, state in states.items():
            converted = {name: convert(parameter, value) for name, value in state.items()}
            present[replace(parameter) if isinstance(parameter, Tensor) else parameter] = converted


def check_optimizers_of_shards(
    optimizers: Iterable[Optimizer], elementwise: Iterable[type[Optimizer]], steps_as_they_are: bool
) -> None:
    """Raises a ValueError if an optimizer would need whole tensors.

    Args:
        elementwise: further classes that update each value by itself.
        steps_as_they_are: whether the method applies the whole update by the optimizer's own step.
    """
    names = ", ".join(cls.__name__ for cls in ELEMENTWISE)
    others = ", ".join(cls.__name__ for cls in OF_DTENSORS)
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer) in (*ELEMENTWISE, *elementwise):
            continue
        if type(optimizer) not in OF_DTENSORS:
            raise ValueError(
                f"{name} is not known to be element-wise, as {names} are, and a rank has only a shard of each "
                f"parameter: use one of these with replicas=, or {others} with a method that averages weights, or a "
                "model that every rank holds whole."
            )
        if not steps_as_they_are:
            raise ValueError(
                f"{name} steps on whole matrices, and this method updates shards of them: use one of {names} with "
                f"replicas=, or {name} with a method that averages weights."
            )
