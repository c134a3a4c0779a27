"""Emulated hosts without root: in a user namespace, where the kernel lets users create one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from lightning_pipesync.lab.netlab.network import missing_capabilities

#: The named network namespaces are in /run, which is the machine's: the command gets an empty one.
_WITH_OWN_RUN = ["sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]
_UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def enter_user_namespace(command: Sequence[str] | None = None) -> None:
    """Replaces this process by one that has the capabilities for a network of hosts, if it lacks them.

    Returns, with nothing changed, if this process has them, or may not create a user namespace: then
    :class:`~lightning_pipesync.lab.netlab.Network` says what is missing.

    Args:
        command: what the new process runs; by default what this process was started with.
    """
    if not sys.platform.startswith("linux") or not missing_capabilities():
        return
    try:
        allowed = subprocess.run([*_UNSHARE, *_WITH_OWN_RUN, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # There is no such program.
        return
    if allowed:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(_UNSHARE[0], [*_UNSHARE, *_WITH_OWN_RUN, *(command or [sys.executable, *sys.orig_argv[1:]])])
