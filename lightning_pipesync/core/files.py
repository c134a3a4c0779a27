"""Files that are never seen half-written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager with a path to write to, beside ``path``, which then becomes ``path``, at once.

    After an error, such as a full disk, it is removed, and ``path`` is what it was before.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")  # several jobs may write the same file
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
