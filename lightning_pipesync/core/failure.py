"""What a user reads when a peer is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta


@contextmanager
def naming_lost_peer(rank: int, what: str, timeout: timedelta) -> Iterator[None]:
    """Raises a RuntimeError that says what ``rank`` waited for, instead of the backend's own."""
    try:
        yield
    except RuntimeError as error:
        # Without the place in the backend's source, and without its advice.
        cause = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
        raise RuntimeError(
            f"Rank {rank} waited in vain for {what}. That process has died, hangs, or was slower than "
            f"timeout_s={timeout.total_seconds():g} seconds ({cause})."
        ) from error
