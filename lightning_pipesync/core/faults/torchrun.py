"""Reports the error that ends a process to the agent of torchrun that has started it.

The agent prints the error of the process that failed first at the end of its output. See
https://docs.pytorch.org/docs/stable/elastic/errors.html.
"""

from __future__ import annotations

import functools
import os

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_pipesync.core.faults.shutdown import at_shutdown, error_at_shutdown


@functools.cache
def report_error_at_shutdown() -> None:
    """Writes the exception that ends this process to the error file of its agent, if there is one.

    So does ``@record`` on a script's main function; its file stays as it is.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        at_shutdown(lambda _: _report(os.environ["TORCHELASTIC_ERROR_FILE"]), first=True)


def _report(file: str) -> None:
    error = error_at_shutdown()
    if error is None or os.path.exists(file):
        return
    try:
        raise error  # the handler writes the traceback of the exception that is being handled
    except BaseException as raised:
        get_error_handler().record_exception(raised)
