"""Classes that a file or an environment variable names: only those of modules that are imported already."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin

import yaml

#: Types whose values no class is needed for.
_PLAIN = (bool, int, float, str, NoneType)


def check_class_paths(name: str, annotation: Any, value: Any) -> None:
    """Raises a ValueError if a setting names a class of a module that is not imported: to import it is to run its code.

    ``annotation`` is the setting's type, and ``value`` its value, or the YAML text of that.
    """
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            return  # a text
    for path in _class_paths(value, _mentions_class(annotation)):
        module = path.rpartition(".")[0]
        if module not in sys.modules:
            raise ValueError(
                f"{name} names {path!r}, and the module {module!r} is not imported: files and environment variables "
                "import none. Import it in the script before, or set this in code."
            )


def _class_paths(value: Any, also_texts: bool) -> Iterator[str]:
    """Yields what is, or with ``also_texts`` may be, the import path of a class."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _class_paths(part, also_texts or key == "class_path")
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _class_paths(part, also_texts)
    elif isinstance(value, str) and also_texts and "." in value and all(map(str.isidentifier, value.split("."))):
        yield value


def _mentions_class(annotation: Any) -> bool:
    """Returns whether a value of this type may be a class, or an object of one that can be named."""
    origin = get_origin(annotation)
    if origin is type or (origin is None and isinstance(annotation, type) and annotation not in _PLAIN):
        return True
    return any(_mentions_class(part) for part in get_args(annotation))
