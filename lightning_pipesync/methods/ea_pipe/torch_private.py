"""Private names of torch that only EA-Pipe needs: hooks of modules, traced graphs, version counters.

Each is checked when it is imported: see :mod:`lightning_pipesync.core.private_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointFunction

from lightning_pipesync.core.private_names import missing, require
from lightning_pipesync.core.torch_private import tree_flatten

require(torch.autograd, "_unsafe_preserve_version_counter")
require(torch.ops.aten.add_.Tensor, "_schema")  # without it, written_by() would return nothing
require(nn.Module(), "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
require(torch.UntypedStorage, "_cdata")


def is_pipe_split(node: Node) -> bool:
    """Returns whether ``node`` is a call of :func:`torch.distributed.pipelining.pipe_split`."""
    return node.target is torch.ops.pippy._pipe_split.default


def written_by(node: Node) -> list[Node]:
    """Returns the values that an operation in a graph, or a region of operations, writes to in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a region without gradients or under autocast is a graph among the arguments
        nodes = [argument for argument in node.args if isinstance(argument, Node) and argument.op == "get_attr"]
        found = [attrgetter(str(one.target))(node.graph.owning_module) for one in nodes]
        regions = [one.graph for one in found if isinstance(one, GraphModule)]
        return [written for region in regions for inner in region.nodes for written in written_by(inner)]
    pairs = zip(schema.arguments, node.args, strict=False)  # an omitted argument has its default, and is not written to
    named = [(argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs]
    written = [value for argument, value in [*pairs, *named] if argument.alias_info and argument.alias_info.is_write]
    return [value for value in tree_flatten(written)[0] if isinstance(value, Node)]


@contextmanager
def reporting_own_gradients(tell: Callable[[str], object]) -> Iterator[None]:
    """Context that calls ``tell`` with a description of Python code that changes gradients, which a graph lacks."""
    if "apply" not in vars(torch.autograd.Function):
        raise missing(torch.autograd.Function, "apply")
    function, apply, register_hook = (
        torch.autograd.Function,
        vars(torch.autograd.Function)["apply"],
        Tensor.register_hook,
    )

    def told_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            tell("checkpoint(use_reentrant=True): set use_reentrant=False")
        elif not cls.__module__.startswith(
            ("torch._library", "torch._higher_order_ops")
        ):  # operators, which graphs have
            tell(f"the backward of the autograd.Function {cls.__qualname__}")
        return apply.__func__(cls, *args, **kwargs)

    def told_register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        tell("a hook that Tensor.register_hook has set in the forward pass")
        return register_hook(tensor, hook)

    function.apply, Tensor.register_hook = classmethod(told_apply), told_register_hook  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        function.apply, Tensor.register_hook = apply, register_hook  # type: ignore[method-assign]


def has_hooks(module: nn.Module) -> bool:
    """Returns whether ``module`` itself, not its submodules, has forward or backward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether ``module`` itself, not its submodules, has hooks for the backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def memory_of(tensor: Tensor) -> int:
    """Returns an identifier of the storage of a tensor, which may be fake."""
    return tensor.untyped_storage()._cdata


def hidden_from_autograd(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Context in which autograd does not see in-place writes to ``tensors``."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))
