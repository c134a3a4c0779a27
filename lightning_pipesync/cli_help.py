"""Help of the command ``pipesync``: what a user types, without the types of Python."""

from __future__ import annotations

from argparse import SUPPRESS, Action
from collections.abc import Iterable
from copy import copy
from typing import Any

from jsonargparse import DefaultHelpFormatter
from typing_extensions import override


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
