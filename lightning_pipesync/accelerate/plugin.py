"""The plugin that selects an Accelerator's method and its settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME, NUMBER
from lightning_pipesync.core.yaml_files import YamlFile
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
        sources = {name: PREFIX + name.upper() for name in given}
        if CONFIG_VARIABLE in environment:
            section, places = settings_in(YamlFile(environment[CONFIG_VARIABLE]))
            given, sources = {**section, **given}, {**places, **sources}
        elif given and "method" not in given:
            names = ", ".join(PREFIX + name.upper() for name in given)
            raise ValueError(f"The environment has {names}, and no {METHOD_VARIABLE}: set it, too.")
        return plugin_from(given, sources) if given else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method!r}, {self.config!r})"


def settings_in(file: YamlFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns method and settings from a file, and where in it each is."""
    section = file.content.get(SECTION, file.content)
    if not isinstance(section, dict) or "method" not in section:
        raise ValueError(
            f"{file.path} does not name a method: add a line such as 'method: selsync', at the top level or under "
            f"'{SECTION}:'."
        )
    around = [SECTION] * (SECTION in file.content)
    settings = {str(name): value for name, value in section.items()}
    return settings, {name: file.at(*around, name) for name in settings}


def plugin_from(settings: Mapping[str, Any], sources: Mapping[str, str]) -> PipeSyncPlugin:
    """Returns the plugin for ``method`` and settings; an error says from which of ``sources`` a wrong one is.

    That is the first one that the error's message names, besides the method.
    """
    try:
        return PipeSyncPlugin.from_mapping(settings)
    except ValueError as error:
        found = {name: re.search(rf"\b{re.escape(name)}\b", str(error)) for name in sources if name != "method"}
        named = {match.start(): name for name, match in found.items() if match is not None}
        source = sources[named[min(named)] if named else "method"]
        raise ValueError(f"{source}: {error}") from None
