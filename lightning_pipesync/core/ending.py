"""What has to happen before a process ends that nobody has told so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from threading import Thread

import torch
import torch.distributed as dist


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


def destroy_process_groups_at_end() -> None:
    """Has the process groups destroyed when this process ends, after all that :func:`at_end_of_process` has called.

    A thread of Gloo's that lets go of a tensor while Python's interpreter is being taken down ends the process with
    SIGABRT (pytorch/pytorch#179291): a job that has done its work would count as failed. Frameworks leave the default
    group open. After an error, and where NCCL is used, it is left to the process's end, as ever.
    """
    Finalize(None, _destroy_process_groups, exitpriority=0)


def error_at_end() -> BaseException | None:
    """Returns the exception with which this process ends, if it does."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def _destroy_process_groups() -> None:
    if error_at_end() is not None or torch.cuda.is_initialized() or not dist.is_initialized():
        return

    def destroy() -> None:
        with suppress(Exception):
            dist.destroy_process_group()

    thread = Thread(target=destroy, daemon=True)  # an operation that nobody has waited for may never end
    thread.start()
    thread.join(10.0)
