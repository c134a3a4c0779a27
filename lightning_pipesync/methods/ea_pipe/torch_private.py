"""Private names of torch that only EA-Pipe needs: hooks of modules, traced graphs, version counters.

Each is checked when it is imported: see :mod:`lightning_pipesync.core.private_names`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_pipesync.core.private_names import missing, require
from lightning_pipesync.core.torch_private import tree_flatten

require(torch.autograd, "_unsafe_preserve_version_counter")
require(torch.ops.aten.add_.Tensor, "_schema")  # without it, written_by() would return nothing
require(nn.Module(), "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
require(torch.UntypedStorage, "_cdata")


def is_pipe_split(node: Node) -> bool:
    return node.target is torch.ops.pippy._pipe_split.default


def written_by(node: Node) -> list[Node]:
    """Returns the values that an operation in a graph, or a region of operations, writes to in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a region without gradients or under autocast is a graph among the arguments
        names = [str(arg.target) for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        regions = [attrgetter(name)(node.graph.owning_module) for name in names]
        nodes = [inner for region in regions if isinstance(region, GraphModule) for inner in region.graph.nodes]
        return [written for inner in nodes for written in written_by(inner)]
    pairs = zip(schema.arguments, node.args, strict=False)  # an omitted argument has its default, and is not written to
    named = [(argument, node.kwargs[argument.name]) for argument in schema.arguments if argument.name in node.kwargs]
    written = [value for argument, value in [*pairs, *named] if argument.alias_info and argument.alias_info.is_write]
    return [value for value in tree_flatten(written)[0] if isinstance(value, Node)]


@contextmanager
def noting_gradient_code() -> Iterator[list[str]]:
    """Context that yields descriptions of Python code of this thread that changes gradients, which a graph lacks.

    ``Function.apply`` is patched, as no hook of torch sees it: a ``TorchDispatchMode`` sees only the operations in it,
    and autograd's graph has no node of it while the parameters before it are frozen.
    """
    if "apply" not in vars(Function):
        raise missing(Function, "apply")
    found: list[str] = []
    apply, thread = vars(Function)["apply"], get_ident()

    def noting_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        of_operator = cls.__module__.startswith(("torch._library", "torch._higher_order_ops"))  # which graphs have
        if get_ident() == thread and not of_operator:
            reentrant = "checkpoint(use_reentrant=True): set use_reentrant=False"
            backward = f"the backward of the autograd.Function {cls.__qualname__}"
            found.append(reentrant if cls is CheckpointFunction else backward)
        return apply.__func__(cls, *args, **kwargs)

    Function.apply = classmethod(noting_apply)  # type: ignore[assignment,method-assign]
    try:
        with _NotingTensorHooks(found):
            yield found
    finally:
        Function.apply = apply  # type: ignore[method-assign]


class _NotingTensorHooks(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            self._found.append("a hook that Tensor.register_hook has set in the forward pass")
        return func(*args, **(kwargs or {}))


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether ``module``, without its submodules, has hooks for the backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def memory_of(tensor: Tensor) -> int:
    """Returns an identifier of the storage of a tensor, which may be fake."""
    return tensor.untyped_storage()._cdata


def hidden_from_autograd(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Context in which autograd does not see in-place writes to ``tensors``."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))
