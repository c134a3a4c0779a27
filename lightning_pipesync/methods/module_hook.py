"""A hook on a module that stays behind when the module is copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class ModuleHook:
    """Calls a method of a living object. A copy of it, deep or pickled with the module that has it, does nothing.

    Args:
        method: a bound method; None: do nothing.
    """

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        method = self._method and self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None]]:
        return ModuleHook, (None,)
