"""Names of other libraries' objects: a missing private one raises an error, and others take the place of some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: The libraries whose private names are used.
LIBRARIES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "accelerate",
    "transformers",
    "torchmetrics",
    "pyroute2",
)


def require(owner: Any, *names: str) -> None:
    """Checks that ``owner``, an object, class or module of a library, has the attributes ``names``.

    Without the check, setting an attribute that was renamed would have no effect and raise no error.

    Raises:
        RuntimeError: a name is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise missing(owner, name)


def missing(owner: Any, name: str) -> RuntimeError:
    """Returns the error that names the library, its version and the missing name."""
    origin = next(origin for origin in _origins(owner) if _library(origin) is not None)
    library = str(_library(origin))
    return RuntimeError(
        f"{library} {sys.modules[library].__version__} has no {origin.__name__}.{name}, on which lightning-pipesync "
        f"relies, or does not use it: install a version of {library} that is tested, see 'Versions' in README.md."
    )


class ChecksOverrides:
    """Base of classes that override methods of a library's class, marked with ``@override``.

    If the library renames such a method, the override is never called, and for example wrong weights are saved. So each
    overridden method is checked when a class with both bases is created.

    Raises:
        RuntimeError: the library's class has no such method.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        theirs = [base for base in cls.__mro__ if _library(base) is not None]
        if not theirs:  # a mixin, to which the library's class is added later
            return
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] != __package__.partition(".")[0]:
                continue
            for name, member in vars(base).items():
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                overrides = getattr(function, "__override__", False)
                if overrides and not any(name in vars(other) for other in theirs):
                    raise missing(theirs[0], name)


def overrides(owner: Any, *names: str) -> bool:
    """Returns whether an object of a user's has a method of its own with one of the ``names``: not a library's."""
    ours = __package__.partition(".")[0]
    for name in names:
        found = next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)
        is_users = found is not None and _library(found) is None and found.__module__.partition(".")[0] != ours
        if is_users or name in vars(owner):  # as of a LambdaCallback
            return True
    return False


def _origins(owner: Any) -> tuple[Any, ...]:
    if isinstance(owner, ModuleType):
        return (owner,)
    return owner.__mro__ if isinstance(owner, type) else type(owner).__mro__


def _library(origin: Any) -> str | None:
    """Returns the library of a class or module; None if it is not one of :data:`LIBRARIES`."""
    name = origin.__name__ if isinstance(origin, ModuleType) else origin.__module__
    root = str(name.partition(".")[0])
    return root if root in LIBRARIES else None


@contextmanager
def with_attributes(owner: object, **values: Any) -> Iterator[None]:
    """Context manager in which an object has other attributes, such as methods; afterwards, those that it had."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(own)
