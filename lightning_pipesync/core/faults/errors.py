"""Which errors another rank has caused, and which are no errors."""

from __future__ import annotations

import re
import sys
from typing import TypeVar

import torch.distributed as dist

E = TypeVar("E", bound=BaseException)

#: The attribute of an error that names the rank at fault.
_NAMES_RANK = "pipesync_names_rank"

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


def lost_peer_behind(error: BaseException) -> BaseException | None:
    """Returns the error that another rank has caused: this one, or one that was being handled when it was raised."""
    behind: BaseException | None = error
    while behind is not None and not is_lost_peer(behind):
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return behind


def names_rank(error: BaseException) -> bool:
    """Returns whether an error ends with a line that names the rank at fault."""
    return hasattr(error, _NAMES_RANK)


def mark_as_naming(error: E) -> E:
    """Makes :func:`names_rank` return True."""
    setattr(error, _NAMES_RANK, True)
    return error


def add_last_line(error: BaseException, line: str) -> None:
    """Appends a line to an error, where it is a message; otherwise as a note, which Python 3.11 prints after it."""
    if error.args == (str(error),):
        error.args = (f"{error}\n{line}",)
    elif sys.version_info >= (3, 11):
        error.add_note(line)
    mark_as_naming(error)


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
