"""The registry of methods, and their settings from untyped sources: YAML files and environment variables."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from lightning_pipesync.core.names import did_you_mean
from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.ea_pipe import EAPipe
from lightning_pipesync.methods.local_sgd import LocalSGD
from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.pipe_sgd import PipeSGD
from lightning_pipesync.methods.selsync import SelSync
from lightning_pipesync.methods.servers import ParameterServer
from lightning_pipesync.methods.setting_types import hint_for, words_for
from lightning_pipesync.methods.settings import Settings, overridden
from lightning_pipesync.training.class_paths import check_class_paths
from lightning_pipesync.training.presets import PRESETS

#: Every method by its name. Strategies, plugin, command line and docs derive from it.
METHODS: dict[str, type[Method]] = {
    method.name: method for method in (DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync)
}


def resolve(name: Any, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the name of the method that ``name`` stands for, and ``settings``, which override those of its preset.

    A name is read in lower case, as Lightning reads that of a strategy, and with underscores for dashes. What is not
    the name of a method or preset is returned as it is.
    """
    read = str(name).lower().replace("-", "_")
    if read in PRESETS:
        preset = PRESETS[read]
        return preset.method, overridden(METHODS[preset.method].config_type, preset.settings, settings)
    return (read if read in METHODS else name), dict(settings)


#: Make what advises a Trainer's training by a method, or None. The laboratory does, which is above all who ask for it.
ADVISORS: list[Callable[[Any, Method], Any]] = []


def check_method(method: type[Method]) -> None:
    """Raises a ValueError unless a class is a complete method, with a name that no other one has, and with settings."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ValueError(f"{method!r} is no method: pass a class that inherits from SyncMethod or EAPipe.")
    of, name, config_type = method.__name__, getattr(method, "name", None), getattr(method, "config_type", None)
    if not (isinstance(name, str) and name):
        raise ValueError(f"{of} has no name: set name = 'my_method' in the class, under which frameworks find it.")
    if METHODS.get(name, method) is not method:
        raise ValueError(f"name={name!r} is that of {METHODS[name].__name__}: choose another one.")
    if name in PRESETS:
        raise ValueError(f"name={name!r} is that of a preset: choose another one.")
    if of in (other.__name__ for other in METHODS.values() if other is not method):
        raise ValueError(f"{of} is the class of another method, whose {of}Strategy it would replace: rename the class.")
    if not (isinstance(config_type, type) and issubclass(config_type, Settings)):
        raise ValueError(
            f"{of} has no config_type: set it to the class of its settings, a frozen dataclass that inherits from "
            "Settings."
        )
    parameters = vars(config_type).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise ValueError(f"config_type={config_type.__name__} is no frozen dataclass: add @dataclass(frozen=True).")
    for field in fields(config_type):
        if field.default is MISSING:
            raise ValueError(f"{config_type.__name__}.{field.name} has no default: give it one.")
    if inspect.isabstract(method):
        raise ValueError(f"{of} is not complete: implement {', '.join(sorted(method.__abstractmethods__))}.")


def make_config(method: object, settings: Mapping[str, Any]) -> Settings:
    """Returns the settings of the method of that name, or of a preset's.

    Raises:
        ValueError: there is no such method or setting, or one is out of its range.
    """
    config_type, settings = _present(method, settings)
    return config_type(**settings)


def parse_config(method: object, settings: Mapping[str, Any]) -> Settings:
    """Returns the settings of the method of that name, or of a preset's, from YAML or from environment variables.

    A text is read as YAML of the setting's type, so that ``"0.3"`` is a number.

    Raises:
        ValueError: there is no such method or setting, one is not of its type or out of its range, or names a class of
            a module that is not imported.
    """
    from jsonargparse import ArgumentError, ArgumentParser  # imported here because its import is slow

    config_type, settings = _present(method, settings)
    types, annotations = get_type_hints(config_type), get_type_hints(config_type, include_extras=True)
    parsed: dict[str, Any] = {}
    for name, value in settings.items():
        check_class_paths(name, types[name], value)
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument(f"--{name}", type=types[name])
        try:
            found = parser.parse_object({name: math.inf if str(value).lower() == "inf" else value})
        except ArgumentError as error:
            # Of a class, and its arguments.
            detail = f" {error}" if isinstance(value, Mapping) else hint_for(annotations[name], value)
            raise ValueError(f"{name} must be {words_for(annotations[name])}, got {value!r}.{detail}") from None
        parsed |= parser.instantiate(found).as_dict()
    return config_type(**parsed)


def _present(method: object, settings: Mapping[str, Any]) -> tuple[type[Settings], dict[str, Any]]:
    """Returns the class of a method's settings, and ``settings``, all of which it has."""
    method, settings = resolve(method, settings)
    if not isinstance(method, str) or method not in METHODS:
        known = [*METHODS, *PRESETS]
        raise ValueError(f"method must be one of {', '.join(known)}, got {method!r}.{did_you_mean(method, known)}")
    config_type = METHODS[method].config_type
    known = [field.name for field in fields(config_type)]
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"method={method!r} has no setting {name!r}. It has: {', '.join(known)}.{hint}")
    return config_type, settings
