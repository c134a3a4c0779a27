"""The settings of what a benchmark compares, from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_pipesync.lab.bench.named_settings import resolved_settings, split_method, unknown_method


def parse_named(text: str, config_types: Mapping[str, type[Any]], fixed: Mapping[str, Any] | None = None) -> Any:
    """Parses ``NAME`` or ``NAME:SETTING=VALUE,...`` into the dataclass of that name, with ``fixed`` settings.

    Raises:
        ValueError: the name or a setting is unknown, or a value out of its range.
    """
    name = split_method(text)[0]
    if name not in config_types:
        raise unknown_method(name, config_types)
    fixed = fixed or {}
    settings = resolved_settings(text, config_types[name], fixed)
    try:
        return config_types[name](**settings, **fixed)
    except TypeError as error:
        raise ValueError(f"methods: a value in {text!r} is of the wrong type ({error}).") from error


def readable(method: str) -> str:
    """Returns a method with its settings, with spaces at which a line may break."""
    return method.replace(":", ": ", 1).replace(",", ", ")
