"""Cleanup at interpreter shutdown, and what is said of the exception that ends the process."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from threading import Thread
from types import TracebackType

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a default group, see below
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_pipesync.core.faults.errors import names_rank

#: Maximum seconds to wait for a thread after an error: the peers that it waits for may be gone.
AFTER_ERROR_S = 1.0

#: Maximum seconds to wait for a thread at the very end of a process that has succeeded: longer than a store's answer.
LAST_S = 10.0

#: Threads that did not end in time.
_unfinished: list[Thread] = []

_calls_if_uncaught: list[Callable[[BaseException], object]] = []


def at_shutdown(close: Callable[[float], object], *, first: bool = False) -> Finalize:
    """Registers ``close`` to be called when this process ends, also in forked processes; can be cancelled.

    So the messages of a rank's last step still arrive, which a peer may wait for. ``close`` gets the seconds that it
    may take at most: fewer after an error, when peers may be gone. Those with ``first`` are called before the others.
    """
    return Finalize(
        None, lambda: close(10.0 if error_at_shutdown() is None else AFTER_ERROR_S), exitpriority=2 if first else 1
    )


def destroy_process_groups_at_shutdown() -> None:
    """Destroys the process groups when this process ends, after the calls of :func:`at_shutdown`.

    A Gloo thread that releases a tensor while the interpreter shuts down aborts the process with SIGABRT
    (pytorch/pytorch#179291), so that a job that succeeded counts as failed. Frameworks leave the default group open.
    Does nothing after an error, nor on CUDA.

    A group lives as long as something refers to it. The functions of ``torch.distributed.nn.functional`` refer to the
    default group as it is when they are imported, which an optimizer does: so this module imports them before.
    """
    Finalize(None, _destroy_process_groups, exitpriority=0)


def join_thread(thread: Thread, timeout_s: float) -> None:
    """Waits for a thread that may be in C++ code, of Gloo or of a store.

    If it ends neither in ``timeout_s`` seconds nor by the end of this process, and an error ends that, it exits at once
    after all other cleanup: the interpreter would stop the thread within C++ code, which aborts the process by
    SIGABRT. The exit status is that of the error: SIGINT after Ctrl-C, otherwise 1.

    Without an error the status is not known here, which ``sys.exit`` may have been given. So the process waits for the
    thread for some seconds more; one that waits even then, such as for a host that is cut off, will hardly return just
    while the interpreter stops.
    """
    thread.join(timeout_s)
    if thread.is_alive():
        if not _unfinished:
            Finalize(None, _exit_before_abort, exitpriority=-1)
        _unfinished.append(thread)


def error_at_shutdown() -> BaseException | None:
    """Returns the exception that ends this process; None if it ends without one."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def call_if_uncaught(call: Callable[[BaseException], object]) -> Callable[[], None]:
    """Registers ``call`` for the exception that ends this process; returns what undoes that.

    It is called before Python prints the exception, and before anything is cleaned up: what it appends is the last line
    of the output. At the prompt of an interpreter, which goes on after an exception, there are no calls.
    """
    _install_excepthook()
    _calls_if_uncaught.append(call)
    return lambda: _calls_if_uncaught.remove(call) if call in _calls_if_uncaught else None


@functools.cache
def report_error_at_shutdown() -> None:
    """Writes the exception that ends this process to the error file of torchrun's agent, if there is one.

    The agent prints the error of the process that failed first at the end of its output. ``@record`` on a script's main
    function writes the file, too; it then stays as it is, unless the error names a lost rank, as it may not have then.
    See https://docs.pytorch.org/docs/stable/elastic/errors.html.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        at_shutdown(lambda _: _report(os.environ["TORCHELASTIC_ERROR_FILE"]), first=True)


def is_store_of_agent() -> bool:
    """Returns whether torchrun's agent, and not rank 0, runs the job's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache
def _install_excepthook() -> None:
    before = sys.excepthook

    def handle(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (sys.flags.interactive or hasattr(sys, "ps1")):
            for call in _calls_if_uncaught[::-1]:
                with suppress(Exception):
                    call(error)
        before(kind, error, trace)

    sys.excepthook = handle


def _report(file: str) -> None:
    error = error_at_shutdown()
    if error is None or (os.path.exists(file) and not names_rank(error)):
        return
    try:
        raise error  # the handler writes the traceback of the exception that is being handled
    except BaseException as raised:
        get_error_handler().record_exception(raised)


def _exit_before_abort() -> None:
    if error_at_shutdown() is None:
        deadline = time.monotonic() + LAST_S
        for thread in _unfinished:
            thread.join(max(0.0, deadline - time.monotonic()))
        return
    if not any(thread.is_alive() for thread in _unfinished):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if isinstance(error_at_shutdown(), KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def _destroy_process_groups() -> None:
    if error_at_shutdown() is not None or torch.cuda.is_initialized() or not dist.is_initialized():
        return

    def destroy() -> None:
        with suppress(Exception):
            dist.destroy_process_group()

    thread = Thread(target=destroy, daemon=True)  # an operation that was not waited for may never end
    thread.start()
    thread.join(10.0)
