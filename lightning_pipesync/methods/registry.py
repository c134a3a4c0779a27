"""The methods by name, and their settings from where nothing has a type: YAML files, environment variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from lightning_pipesync.methods.method import SyncMethod
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig

MethodConfig = DeARConfig | EAPipeConfig | PipeSGDConfig | SelSyncConfig

CONFIGS: dict[str, type[MethodConfig]] = {
    "dear": DeARConfig,
    "ea_pipe": EAPipeConfig,
    "pipe_sgd": PipeSGDConfig,
    "selsync": SelSyncConfig,
}

#: What trains with which settings. EA-Pipe is not among them: it makes the passes itself.
SYNC_METHODS: dict[type[MethodConfig], type[SyncMethod]] = {
    DeARConfig: DeAR,
    PipeSGDConfig: PipeSGD,
    SelSyncConfig: SelSync,
}


def make_config(method: object, settings: Mapping[str, Any]) -> MethodConfig:
    """Returns the settings of the method of that name.

    Raises:
        ValueError: there is no such method or setting, or one is out of its range.
    """
    config_type = _config_type(method, settings)
    try:
        return config_type(**settings)
    except TypeError as error:
        raise ValueError(f"A setting of method={method!r} is not of its type: {error}. Given: {settings!r}.") from None


def parse_config(method: object, settings: Mapping[str, Any]) -> MethodConfig:
    """Returns the settings of the method of that name, from a YAML file or from environment variables.

    Args:
        method: its name.
        settings: by name; a text is read as YAML of the setting's type, so that ``"0.3"`` is a number.

    Raises:
        ValueError: there is no such method or setting, or one is not of its type or out of its range.
    """
    from jsonargparse import ArgumentError, ArgumentParser  # takes longer to import than all the rest here

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(_config_type(method, settings), "settings")
    values = {name: math.inf if str(value).lower() == "inf" else value for name, value in settings.items()}
    try:
        parsed = parser.parse_object({"settings": values})
    except ArgumentError as error:
        raise ValueError(f"A setting of method={method!r} is not of its type. {error}") from None
    config: MethodConfig = parser.instantiate(parsed).settings
    return config


def _config_type(method: object, settings: Mapping[str, Any]) -> type[MethodConfig]:
    """Returns the class of a method's settings, which has all of those."""
    if not isinstance(method, str) or method not in CONFIGS:
        raise ValueError(f"method must be one of {', '.join(CONFIGS)}, got {method!r}.")
    known = [field.name for field in fields(CONFIGS[method])]
    for name in settings:
        if name not in known:
            raise ValueError(f"method={method!r} has no setting {name!r}. It has: {', '.join(known)}.")
    return CONFIGS[method]
