"""Which errors another rank has caused, and which are no errors."""

from __future__ import annotations

import re

import torch.distributed as dist

#: The start of a connection error's message: a place in Gloo's source; none if the call has its own timeout or the
#: connection has timed out before.
_CONNECTION_ERROR = re.compile(
    r"(Gloo connectFullMesh failed with )?\[\S*/gloo/|Application timeout caused pair closure|Operation timed out!"
)


def is_connection_error(error: BaseException | None) -> bool:
    """Returns whether ``error`` is a connection error of PyTorch."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _CONNECTION_ERROR.match(str(error)) is not None


def is_lost_peer(error: BaseException | None) -> bool:
    """Returns whether another rank has caused ``error``: a connection error, or what names the rank at fault."""
    return error is not None and (is_connection_error(error) or is_connection_error(error.__cause__))


def is_normal_end(error: BaseException | None) -> bool:
    """Returns whether a process that ends with ``error``, or with none, has succeeded."""
    if type(error) is SystemExit:  # not one derived from it, such as that of Lightning after a SIGTERM
        return error.code in (0, None)
    return error is None or isinstance(error, (GeneratorExit, StopIteration))


def cause_of(error: BaseException) -> str:
    """Returns the message of a connection error without the place in the backend's source and without its advice."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0].strip()


def in_short(error: BaseException) -> str:
    """Returns the class of an error and the first line of its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}" if lines else type(error).__name__
