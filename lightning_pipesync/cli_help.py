"""Help of the command ``pipesync``: what a user types, without the types of Python; and its configuration files."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from copy import copy
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter
from typing_extensions import override

from lightning_pipesync.core.yaml_files import YamlFile


class Parser(ArgumentParser):
    """Refuses a configuration file by its name, and the line that is wrong."""

    @override
    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        file, command = YamlFile(path), self.prog.replace(" [options]", "")
        known = [name for action in self._actions if action.default is not SUPPRESS for name in _names(action)]
        file.check_names(known, f"an option of {command}")
        self.exit_on_error = False
        try:
            return super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:
            names = re.findall(r'^Parser key "(.+?)"', str(error))  # of an option whose value is wrong
            wrong = f"{names[0]} has a wrong value: see {command} --help." if names else str(error)
            raise ValueError(f"{file.at(*names)}: {wrong}") from None
        finally:
            self.exit_on_error = True


class HelpFormatter(DefaultHelpFormatter):
    """Shows options with several values as ``--hosts HOSTS ...``, and defaults that are values."""

    @override
    def add_argument(self, action: Action) -> None:
        super().add_argument(_shown(action))

    @override
    def add_usage(self, usage: str | None, actions: Iterable[Action], *args: Any, **kwargs: Any) -> None:
        super().add_usage(usage, [_shown(action) for action in actions], *args, **kwargs)

    @override
    def _get_help_string(self, action: Action) -> str:
        text, default = action.help or "", action.default
        if action.required and action.option_strings:
            return f"{text} (required)"
        if default is None or default is SUPPRESS or default is False or default == () or not action.option_strings:
            return text
        return f"{text} (default: {_as_typed(default)})".replace("%", "%%")


def _shown(action: Action) -> Action:
    """Returns an option as it is to be shown: without the spelling that adds to a list."""
    shown = copy(action)
    shown.option_strings = [option for option in action.option_strings if not option.endswith("+")]
    if action.metavar == "[ITEM,...]":
        shown.metavar = f"{action.dest.upper()} ..."
    return shown


def _as_typed(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


def _names(action: Action) -> list[str]:
    """Returns what a configuration file may have for an option, or for subcommands: their names."""
    return [action.dest, *(action.choices if isinstance(action.choices, dict) else ())]
