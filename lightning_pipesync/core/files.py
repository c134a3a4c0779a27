"""Files that are never seen half-written, and those that have changed since."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def check_undamaged(path: Any) -> None:
    """Compares the checksums in a file of ``torch.save`` with its contents, which ``torch.load`` does not.

    Does nothing for other files, and for those that are not on a file system.

    Raises:
        ValueError: the file has changed since it was written.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path) or not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        damaged = f"its list of parts ({error})"
    if damaged is not None:
        raise ValueError(
            f"The checkpoint {path} is damaged: {damaged} is not what was written. Resume from an earlier checkpoint."
        )
