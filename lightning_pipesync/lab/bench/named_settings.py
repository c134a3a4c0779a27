"""Methods with their settings on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_pipesync.core.names import did_you_mean
from lightning_pipesync.training.presets import PRESETS
from lightning_pipesync.training.registry import resolve


def split_method(text: str) -> tuple[str, dict[str, Any], str]:
    """Splits ``NAME`` or ``NAME:SETTING=VALUE,...``: the method, the settings of its preset, and those of the user."""
    name, _, chosen = text.partition(":")
    method, preset = resolve(name, {})
    return method, preset, chosen


def parse_settings(text: str, config_type: type[Any], fixed: Iterable[str] = ()) -> dict[str, Any]:
    """Parses the settings of ``NAME:SETTING=VALUE,...``, whose ranges are not checked."""
    name, _, rest = text.partition(":")
    known = {key: field for key, field in config_type.__dataclass_fields__.items() if key not in fixed}
    settings = {}
    for assignment in filter(None, rest.split(",")):
        key, equals, value = assignment.partition("=")
        if key not in known or not equals:
            hint = did_you_mean(key, known)
            raise ValueError(
                f"methods: {assignment!r} in {text!r} is no setting=value; {name} has {', '.join(known)}.{hint}"
            )
        # "none" is None for a setting that may be None, else a word, such as a codec.
        settings[key] = None if value.lower() == "none" and "None" in str(known[key].type) else _value(value)
    return settings


def resolved_settings(text: str, config_type: type[Any], fixed: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the settings of :func:`parse_settings`, with those of a preset that act with them."""
    return resolve(text.partition(":")[0], parse_settings(text, config_type, fixed))[1]


def unknown_method(name: str, known: Iterable[str], otherwise: str = "") -> ValueError:
    """Returns the error for a name that is not ``known``, with ``otherwise`` at its end."""
    listed = [*known]
    hint = did_you_mean(name, [*listed, *PRESETS])
    return ValueError(f"methods: {name!r} is not known; there are {', '.join(listed)}.{hint}{otherwise}")


def _value(text: str) -> Any:
    """Parses a number, a tuple such as ``0.5:0.5``, or a boolean; any other text is returned as it is."""
    if ":" in text:
        return tuple(map(_value, text.split(":")))
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
