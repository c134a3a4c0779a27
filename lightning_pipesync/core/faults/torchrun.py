"""Reports the error that ends a process to the agent of torchrun that has started it.

The agent prints the error of the process that failed first at the end of its output. See
https://docs.pytorch.org/docs/stable/elastic/errors.html.
"""

from __future__ import annotations

import functools
import os

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_pipesync.core.faults.errors import names_rank
from lightning_pipesync.core.faults.shutdown import at_shutdown, error_at_shutdown


def is_agents() -> bool:
    """Returns whether torchrun's agent, and not rank 0, runs the job's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@functools.cache
def report_error_at_shutdown() -> None:
    """Writes the exception that ends this process to the error file of its agent, if there is one.

    So does ``@record`` on a script's main function; its file stays as it is, unless the error names a lost rank, which
    it may not have done then.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        at_shutdown(lambda _: _report(os.environ["TORCHELASTIC_ERROR_FILE"]), first=True)


def _report(file: str) -> None:
    error = error_at_shutdown()
    if error is None or (os.path.exists(file) and not names_rank(error)):
        return
    try:
        raise error  # the handler writes the traceback of the exception that is being handled
    except BaseException as raised:
        get_error_handler().record_exception(raised)
