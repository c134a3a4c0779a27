"""The types of settings: whether a value is of the type that a dataclass states, and what a message calls that type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from torch.optim import Optimizer

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.names import did_you_mean

# Types with words of their own.
MiB = Annotated[float, "a number of MiB"]
Seconds = Annotated[float, "a number of seconds"]
MiBRange = Annotated[tuple[float, float], "a pair of numbers of MiB"]
Injection = Annotated[tuple[float, float], "a pair (alpha, beta)"]
Compression = Annotated[Codec | str, "the name of a codec or a Codec"]
OptimizerClasses = Annotated[tuple[type[Optimizer], ...], "a tuple of optimizer classes"]

#: What :func:`fitted` returns for a value of another type.
UNFIT = object()

_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}


def checked(name: str, annotation: Any, value: Any) -> Any:
    """Returns the value of the setting ``name`` as one of its type, so that what means the same has the same ``repr``.

    Scalars of NumPy become Python's, whole numbers ``int``, lists tuples, and None ``"none"`` where that is a choice.

    Raises:
        ValueError: it is not of its type.
    """
    fit = fitted(annotation, value)
    if fit is UNFIT and value is None and any(part is Codec or "none" in get_args(part) for part in parts(annotation)):
        return "none"
    if fit is UNFIT:
        raise ValueError(f"{name} must be {words_for(annotation)}, got {value!r}.{hint_for(annotation, value)}")
    return fit


def hint_for(annotation: Any, value: Any) -> str:
    """Returns the end of a message about a value that is not of its type: the choice that may be meant, or nothing."""
    choices = (choice for part in parts(annotation) if get_origin(part) is Literal for choice in get_args(part))
    return did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])


def parts(annotation: Any) -> Iterator[Any]:
    """Yields the types of a union; another type itself."""
    if get_origin(annotation) is Annotated:
        yield from parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from parts(part)
    else:
        yield annotation


def fitted(annotation: Any, value: Any) -> Any:
    """Returns ``value`` as one of the type ``annotation``, or :data:`UNFIT`."""
    value = value.item() if isinstance(value, np.generic) else value
    fits = (_fitted(part, value) for part in parts(annotation))
    return next((fit for fit in fits if fit is not UNFIT), UNFIT)


def _fitted(part: Any, value: Any) -> Any:
    origin, args = get_origin(part), get_args(part)
    if part is Any:
        return value
    if origin is Literal:
        same = (one for one in args if isinstance(value, type(one)) and not isinstance(value, bool) and value == one)
        return next(same, UNFIT)
    if origin is tuple:
        return _fitted_tuple(args, value)
    if origin is type:
        return value if isinstance(value, type) and issubclass(value, args) else UNFIT
    if part in (int, float):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
            return UNFIT
        if part is float:
            return value
        return int(value) if math.isfinite(value) and value == int(value) else UNFIT
    return value if isinstance(value, origin or part) else UNFIT


def _fitted_tuple(types: tuple[Any, ...], values: Any) -> Any:
    if not isinstance(values, (tuple, list)):
        return UNFIT
    if types[-1] is Ellipsis:
        types = types[:1] * len(values)
    fits = tuple(fitted(one, value) for one, value in zip(types, values, strict=False))
    return fits if len(types) == len(values) and UNFIT not in fits else UNFIT


def words_for(annotation: Any) -> str:
    """Returns what a message calls a type, such as "a number or 'auto'"; None goes without saying."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return str(args[1])
    if origin in (Union, UnionType):
        return " or ".join(words_for(part) for part in args if part is not NoneType)
    if origin is Literal:
        return repr(args[0]) if len(args) == 1 else f"one of {args}"
    return _WORDS.get(annotation) or f"of type {getattr(annotation, '__name__', annotation)}"
