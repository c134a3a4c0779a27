"""SIGTERM as a notice: this process is asked to leave, and has some seconds for it before it is killed."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

#: Seconds after a notice by which a process has left: launchers kill it after 30, and it saves a checkpoint before.
LEAVE_S = 20.0

#: Seconds after a signal in which another one counts as the same: launchers pass on what the system sends to all.
SAME_S = 1.0

#: The exit status of a process that has left: that of one that SIGTERM has ended.
STATUS = 128 + signal.SIGTERM


class Notice:
    """Notes that this process is asked to leave.

    Attributes:
        deadline: the time, of ``time.monotonic``, by which it is to have left; None: nobody has asked.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None
        self._first = math.inf  # the time of the first signal

    def listen(self) -> None:
        """Takes a SIGTERM for a notice, unless the program has a handler of its own; only in the main thread.

        Another one ends the process at once.
        """
        if _on_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.handle)

    def give(self) -> None:
        """Asks this process to leave; may be called by a signal's handler, and several times."""
        self.deadline = self.deadline or time.monotonic() + LEAVE_S

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal: gives the notice; another one ends the process at once."""
        self._first = min(self._first, time.monotonic())
        if time.monotonic() > self._first + SAME_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.give()

    def close(self) -> None:
        """Listens no more."""
        if _on_main_thread() and signal.getsignal(signal.SIGTERM) == self.handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
