"""The memory of a process that is backed by pages: that of all threads and libraries, torch's tensors included.

Linux counts it, and keeps the highest value. glibc keeps freed memory for reuse unless it was mapped by itself, so that
a process would never have less: :func:`map_tensors` makes it map whatever is as large as a tensor that counts.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path

#: Allocations from so many bytes on are mapped by themselves, and given back once they are freed.
MAPPED_FROM = 2**18

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX = -3, -1, -8
_SELF = Path("/proc/self")


def map_tensors() -> None:
    """Makes the C library give the memory of freed tensors back, from now on in this process, which is slower.

    Raises:
        RuntimeError: this is not Linux with glibc.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        raise RuntimeError("The memory of a process is measured on Linux with glibc only: run it there.")
    for option, value in ((_M_MMAP_THRESHOLD, MAPPED_FROM), (_M_TRIM_THRESHOLD, MAPPED_FROM), (_M_ARENA_MAX, 1)):
        libc.mallopt(option, value)


def present_bytes() -> int:
    """Returns the bytes that are in memory now, but for what only garbage holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _bytes_of("VmRSS")


def forget_peak() -> None:
    """Makes :func:`peak_bytes` begin anew."""
    (_SELF / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the most bytes that were in memory since :func:`forget_peak`."""
    return _bytes_of("VmHWM")


def _bytes_of(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
