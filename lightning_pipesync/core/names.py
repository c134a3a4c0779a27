"""The closest known name, for messages about an unknown one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pkgutil import iter_modules


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a question with the closest known one, or nothing."""
    close = get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def did_you_mean_module(name: str, error: Exception) -> str:
    """Returns such a question about a module of the user's that ``error`` says cannot be imported, or nothing.

    Modules of the present folder are known, and those of a package that is imported. An error about another module,
    which that one imports, has no question.
    """
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{name}.".startswith(f"{missing}."):
        return ""
    package = missing.rpartition(".")[0]
    folders = getattr(sys.modules[package], "__path__", ()) if package else [os.getcwd()]
    return did_you_mean(missing, (one.name for one in iter_modules(folders, package and f"{package}.")))
