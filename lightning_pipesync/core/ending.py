"""What has to happen before a process ends that nobody has told so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.util import Finalize


def at_end_of_process(close: Callable[[float], object]) -> None:
    """Has ``close`` called when this process ends, forked ones, too, with the seconds that it may take.

    What a rank sends in its last step still arrives so: a peer may be waiting for it. After an error peers may be gone,
    and there are fewer seconds.
    """
    Finalize(None, lambda: close(10.0 if getattr(sys, "last_value", None) is None else 1.0), exitpriority=1)
