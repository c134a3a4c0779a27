"""The parameters that a method trains, with their layers and optimizers, and the norm of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.core.sharding import copies_of, examine_sharding
from lightning_pipesync.core.torch_private import foreach_norm, gathered_by


@dataclass(frozen=True)
class NamedParameter:
    """A parameter, its layer and its optimizer."""

    name: str  # its first name in the module; tied parameters occur once
    tensor: Tensor
    layer: str  # the name of the module that holds it
    group: tuple[int, int] | None  # the indices of its optimizer and its parameter group; None if no optimizer has it


def collect_parameters(
    module: nn.Module, optimizers: Sequence[Optimizer], replica: Sequence[int] = (0,)
) -> list[NamedParameter]:
    """Returns every parameter of the module and of the optimizers, once, in the order of registration.

    With several ranks in a ``replica``, it is this rank's shard of each, see :mod:`lightning_pipesync.core.dtensors`.

    Raises:
        ValueError: a parameter is not divided among the ranks of the replica, complex, not initialized, sparse in its
            gradient, in several optimizers or on another device than the rest, or an optimizer cannot work on a
            replica; the message names it.
    """
    examine_sharding(module, replica)
    groups: dict[int, tuple[int, int]] = {}
    shared: set[int] = set()
    for i, optimizer in enumerate(optimizers):
        check_optimizer(optimizer)
        for j, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if groups.get(id(tensor), (i, j))[0] != i:
                    shared.add(id(tensor))
                groups[id(tensor)] = (i, j)
    parameters = [
        NamedParameter(name, local_of(tensor), name.rpartition(".")[0], groups.get(id(local_of(tensor))))
        for name, tensor in module.named_parameters()
    ]
    known = {id(parameter.tensor) for parameter in parameters}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, tensor in enumerate(group["params"]):
                if id(tensor) not in known:  # an optimizer trains it, but the module does not register it
                    known.add(id(tensor))
                    layer = f"optimizer{i}.group{j}"
                    parameters.append(NamedParameter(f"{layer}.{k}", tensor, layer, groups[id(tensor)]))
    for parameter in parameters:
        _check_parameter(parameter)
        if id(parameter.tensor) in shared:
            raise ValueError(
                f"Parameter {parameter.name} is in several optimizers; give each parameter to one only. "
                "That of a model which was set up or prepared before counts, too, as long as the model is referenced."
            )
        if parameter.tensor.device != parameters[0].tensor.device:
            raise ValueError(
                f"Parameter {parameter.name} is on {parameter.tensor.device}, and {parameters[0].name} on "
                f"{parameters[0].tensor.device}: all must be on one device."
            )
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise ValueError(f"{name} has sparse=True; sparse gradients are not supported: set sparse=False.")
    return parameters


def check_values(module: nn.Module) -> None:
    """Raises a ValueError if a tensor of a module is on the meta device, and has no values."""
    for what, tensors in (("Parameter", module.named_parameters()), ("Buffer", module.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_meta:
                raise ValueError(
                    f"{what} {name} is on the meta device, and has no values: call to_empty(device=...), and "
                    "initialize or load them."
                )


def modules_with_parameters(module: nn.Module) -> list[nn.Module]:
    """Returns ``module`` and its submodules, those that register parameters themselves, or gather them (FSDP2)."""
    return [child for child in module.modules() if parameters_needed_by(child)]


def parameters_needed_by(module: nn.Module) -> list[Tensor]:
    """Returns the parameters that are read when the forward pass of a module begins.

    They are its own, and those that FSDP2 gathers then, its submodules' and prefetched ones included.
    """
    own = [local_of(parameter) for parameter in module.parameters(recurse=False)]
    gathered = gathered_by(module)
    if not gathered:
        return own
    return list({id(parameter): parameter for parameter in (*own, *map(local_of, gathered))}.values())


def hook_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Registers a post-accumulate-gradient hook, also on a parameter that is frozen for now."""
    requires_grad = parameter.requires_grad
    handle: RemovableHandle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(requires_grad)
    return handle


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the module's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises a ValueError if an optimizer evaluates its closure repeatedly, or communicates."""
    if isinstance(optimizer, LBFGS):
        raise ValueError("The optimizer LBFGS evaluates its closure several times a step, which is not supported.")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError("ZeroRedundancyOptimizer communicates itself: pass the optimizer that it wraps.")


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads what ``optimizer.state_dict()`` returned, bit for bit.

    ``load_state_dict`` alone casts floating-point tensors to the parameter's dtype, which changes later updates: NAdam
    keeps a product in float32 for parameters of float64.
    """
    optimizer.load_state_dict(state)
    saved_at = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in zip(saved_at, parameters, strict=True):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimizer.state[parameter][name] = saved.to(loaded.device, copy=True)


def _check_parameter(parameter: NamedParameter) -> None:
    tensor = parameter.tensor
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"Parameter {parameter.name} has no shape yet: run a batch through the lazy module first.")
    if tensor.is_complex():
        raise ValueError(f"Parameter {parameter.name} is of {tensor.dtype}; complex parameters are not supported.")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ValueError(f"Parameter {parameter.name} has layout {tensor.layout}; only dense ones are supported.")


def norm_of_gradients(parameters: Sequence[Tensor]) -> SquaredNorm:
    """Returns the norm of the gradients of ``parameters``, in the sum of all ranks of a replica once for all copies."""
    present = [(p.grad, copies_of(p)) for p in parameters if p.grad is not None]
    return SquaredNorm([gradient for gradient, _ in present], [copies for _, copies in present])


class SquaredNorm:
    """The squared L2 norm of a whole gradient, computed in one pass without waiting for the device.

    Args:
        gradients: dense tensors on one device; the norm of none is 0.
        copies: for each how many ranks have it, each of which counts its share; none: no other rank has any.
    """

    def __init__(self, gradients: Sequence[Tensor], copies: Sequence[int] = ()) -> None:
        self._ready: torch.cuda.Event | None = None
        if not gradients:
            self._result = torch.zeros(())
            return
        of_each = torch.stack(foreach_norm(list(gradients))).double().square_()
        if any(number > 1 for number in copies):
            of_each.div_(torch.tensor(copies).to(of_each.device, non_blocking=True))
        squares = of_each.sum()
        if squares.is_cuda:
            self._result = torch.empty((), dtype=squares.dtype, pin_memory=True)
            self._result.copy_(squares, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(squares.device))
        else:
            self._result = squares

    def item(self) -> float:
        """Returns the value; on CUDA the host waits for the backward pass, not for work enqueued since."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._result.item()
