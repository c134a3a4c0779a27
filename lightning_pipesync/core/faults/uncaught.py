"""Calls before Python prints the exception that ends this process, and before anything is cleaned up.

So what a call appends to the exception is the last line of the output, and in the file of torchrun's agent.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

_calls: list[Callable[[BaseException], object]] = []


def call_if_uncaught(call: Callable[[BaseException], object]) -> Callable[[], None]:
    """Registers ``call`` for the exception that ends this process; returns what undoes that.

    At the prompt of an interpreter, which goes on after an exception, there are no calls.
    """
    _install()
    _calls.append(call)

    def undo() -> None:
        if call in _calls:
            _calls.remove(call)

    return undo


@functools.cache
def _install() -> None:
    before = sys.excepthook

    def handle(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (sys.flags.interactive or hasattr(sys, "ps1")):
            for call in _calls[::-1]:
                with suppress(Exception):
                    call(error)
        before(kind, error, trace)

    sys.excepthook = handle
