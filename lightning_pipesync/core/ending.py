"""What has to happen before a process ends that nobody has told so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.util import Finalize


def at_end_of_process(close: Callable[[float], object], *, first: bool = False) -> Finalize:
    """Has ``close`` called when this process ends, forked ones, too, with the seconds that it may take.

    What a rank sends in its last step still arrives so: a peer may be waiting for it. After an error peers may be gone,
    and there are fewer seconds.

    Args:
        close: called with the seconds.
        first: before all that is not.

    Returns:
        What can be cancelled.
    """
    return Finalize(None, lambda: close(10.0 if error_at_end() is None else 1.0), exitpriority=2 if first else 1)


def error_at_end() -> BaseException | None:
    """Returns the exception with which this process ends, if it does."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)
