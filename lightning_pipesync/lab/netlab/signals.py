"""Handling of the signals that end a run, so that all hosts are removed first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def raising() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into ``SystemExit(128 + number)`` while the block runs, as Python does for SIGINT."""
    with _handling(_raise, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Defers SIGINT, SIGTERM and SIGHUP while the block runs; raises the first of them at its end."""
    arrived: list[int] = []
    try:
        with _handling(lambda number, frame: arrived.append(number), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def _raise(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any], numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Installs a handler, in the main thread only, as Python requires. An ignored signal stays ignored."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
