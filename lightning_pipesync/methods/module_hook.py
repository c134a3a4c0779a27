"""Hooks on a module that stay behind when the module is copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """Calls a method of a living object. A copy of it, deep or pickled with the module that has it, does nothing.

    In a model that is compiled it breaks the graph.

    Args:
        method: a bound method; None: do nothing.
    """

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    @torch.compiler.disable
    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def call(self, *args: Any) -> None:
        """Calls the method, if there still is one."""
        method = self._method and self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None]]:
        return type(self), (None,)


class EagerHook(ModuleHook):
    """Does nothing where a model is compiled, and leaves its graph whole."""

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.call(*args)
