"""Hooks on a module, or on optimizers, that keep nothing alive, and are disabled in copies of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.dtensors import local_of
from lightning_pipesync.core.torch_private import not_compiled


class ModuleHook:
    """Calls a bound method, which it references weakly; with None, as in a copy of the hook, it does nothing.

    In a compiled model it breaks the graph.
    """

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    @not_compiled
    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def call(self, *args: Any) -> None:
        method = self._method and self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None]]:
        return type(self), (None,)


class EagerHook(ModuleHook):
    """A hook that does nothing while a model is compiled, and does not break the graph."""

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.call(*args)


def hook_loading(
    method: Callable[..., None], modules: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()
) -> list[RemovableHandle]:
    """Registers hooks that call a bound method after a state was loaded into one of ``modules`` or ``optimizers``."""
    hook = ModuleHook(method)
    hooks = [module.register_load_state_dict_post_hook(hook) for module in modules]
    return hooks + [optimizer.register_load_state_dict_post_hook(hook) for optimizer in optimizers]


def modules_with(module: nn.Module, parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Returns those of ``module`` and its submodules that have some of ``parameters``."""
    ids = {id(parameter) for parameter in parameters}
    return [child for child in module.modules() if any(id(local_of(one)) in ids for one in child.parameters())]
