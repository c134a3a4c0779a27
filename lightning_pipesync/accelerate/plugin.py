"""The plugin that selects an Accelerator's method and its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME, NUMBER
from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.settings import check_for_loop
from lightning_pipesync.training.registry import METHODS, make_config, parse_config, resolve

PREFIX = "PIPESYNC_"
#: The variable that names the method.
METHOD_VARIABLE = PREFIX + "METHOD"
#: The variable that names the YAML file with method and settings.
CONFIG_VARIABLE = PREFIX + "CONFIG"
#: The variable with the number of processes that the launcher was configured for.
NUM_PROCESSES_VARIABLE = PREFIX + "NUM_PROCESSES"
#: The key of method and settings in a YAML file that has other keys, too.
SECTION = "pipesync"


class PipeSyncPlugin:
    """A method and its settings, for :class:`PipeSyncAccelerator`.

    Args:
        method: the name of a method, such as ``"dear"``, or of a preset, such as ``"diloco"``; those of the package are
            in ``training.registry.METHODS`` and ``training.presets.PRESETS``.
        settings: the method's settings, those of its dataclass, such as DeARConfig. They override a preset's.

    Attributes:
        method: the method's name.
        config: the settings.

    Raises:
        ValueError: there is no such method or setting, or a setting is out of its range.
    """

    def __init__(self, method: str, **settings: Any) -> None:
        self.method, settings = resolve(method, settings)
        self.config = make_config(self.method, settings)
        check_for_loop(type(self.config), settings)

    @property
    def method_type(self) -> type[Method]:
        """The method's class."""
        return METHODS[self.method]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> PipeSyncPlugin:
        """Returns the plugin for a mapping with ``method`` and settings, whose values may be strings.

        Raises:
            ValueError: there is no such method or setting, or a setting is not of its type or out of its range.
        """
        settings = dict(mapping)
        plugin = cls.__new__(cls)
        plugin.method, settings = resolve(settings.pop("method", None), settings)
        plugin.config = parse_config(plugin.method, settings)
        check_for_loop(type(plugin.config), settings)
        return plugin

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> PipeSyncPlugin | None:
        """Returns the plugin that the environment variables configure; None if none of them is set.

        ``PIPESYNC_METHOD`` names the method; ``PIPESYNC_DELTA`` and so on are its settings. ``PIPESYNC_CONFIG`` names a
        YAML file with ``method`` and settings, which the other variables override. Those of replicas that come and go
        (``PIPESYNC_LIGHTHOUSE``) select no method.

        Raises:
            ValueError: there is no such file, method or setting, or a setting is not of its type or out of its range.
        """
        environment = os.environ if environment is None else environment
        given = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(PREFIX) and name not in (CONFIG_VARIABLE, NUM_PROCESSES_VARIABLE, ADDRESS, NAME, NUMBER)
        }
        if CONFIG_VARIABLE in environment:
            path = environment[CONFIG_VARIABLE]
            given = {**section_of(read_yaml(path), path), **given}
        elif given and "method" not in given:
            names = ", ".join(PREFIX + name.upper() for name in given)
            raise ValueError(f"The environment has {names}, and no {METHOD_VARIABLE}: set it, too.")
        return cls.from_mapping(given) if given else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method!r}, {self.config!r})"


def section_of(content: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Returns method and settings from the content of the file at ``path``."""
    section = content.get(SECTION, content)
    if not isinstance(section, dict) or "method" not in section:
        raise ValueError(
            f"{path} does not name a method: add a line such as 'method: selsync', at the top level or under "
            f"'{SECTION}:'."
        )
    return {str(name): value for name, value in section.items()}


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold names and values, such as 'method: selsync'; it holds {content!r}.")
    return content
