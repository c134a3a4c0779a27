"""Forks whose child leaves the parent's work, and ends as a script does.

[Note: how a child ends]
A rank has to end with all that happens at an interpreter's shutdown, as a user's script does. So a child unwinds the
stack that it was forked in, and its role is called from the outermost function: what that raises ends the interpreter.
There is no ``with`` and no ``finally`` in the functions that fork, which a child would run, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable


class Become(BaseException):
    """Unwinds the stack of a child, which then has another role."""

    def __init__(self, role: Callable[[], object]) -> None:
        super().__init__()
        self.role = role


def fork(role: Callable[[], object]) -> int:
    """Returns the process id of a child that has a role."""
    pid = os.fork()
    if pid == 0:
        raise Become(role)
    return pid


def play(role: Callable[[], object]) -> None:
    """Calls a role, and in each child its role; the outermost function of a program."""
    roles = [role]
    while roles:
        try:
            roles.pop()()
        except Become as become:
            roles.append(become.role)
