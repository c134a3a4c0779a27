"""The closest known name, for messages about an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a question with the closest known one, or nothing."""
    close = get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
