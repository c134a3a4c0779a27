"""``python enter.py NAMESPACE PARENT COMMAND...``: becomes COMMAND in a network namespace, and dies with PARENT.

A standalone program, which does not import the package: between fork and exec, a process that has threads must not
run Python code.
"""

import ctypes
import os
import signal
import sys

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def main(namespace: str, parent: str, *command: str) -> None:
    """Returns only if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC), _CLONE_NEWNET):
        sys.exit(f"pipesync netlab: cannot enter {namespace}: {os.strerror(ctypes.get_errno())}.")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # It died before prctl.
        sys.exit(1)
    # Python ignores these signals, and a program inherits ignored signals.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"pipesync netlab: cannot run {command[0]}: {error.strerror}.", file=sys.stderr, flush=True)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(*sys.argv[1:])
