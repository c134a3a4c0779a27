"""``python enter.py NAMESPACE PARENT ADDRESSES COMMAND...``: becomes COMMAND in a namespace, and dies with PARENT.

The addresses, with commas between them, get the names host0, host1 and so on.

A standalone program, which does not import the package: between fork and exec, a process that has threads must not
run Python code.
"""

import ctypes
import os
import signal
import sys

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2
_PR_SET_PDEATHSIG = 1
_HOSTS = "/etc/hosts"


def main(namespace: str, parent: str, addresses: str, *command: str) -> None:
    """Returns only if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC), _CLONE_NEWNET):
        sys.exit(f"pipesync netlab: cannot enter {namespace}: {os.strerror(ctypes.get_errno())}.")
    if addresses:
        name_hosts(libc, os.path.dirname(namespace), addresses.split(","))
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


def name_hosts(libc: ctypes.CDLL, folder: str, addresses: list[str]) -> None:
    """Gives this process an ``/etc/hosts`` of its own, with the hosts' names before the machine's own lines.

    No name server can be reached here: c10d, which asks for the name of each peer, warns if there is none. ``folder``
    is covered meanwhile, for this process only. Where a mount is not allowed, hosts have no names.
    """
    try:
        with open(_HOSTS) as file:
            lines = file.read()
    except OSError:
        return
    covered, source = folder.encode(), os.path.join(folder, "hosts")
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None)
        or libc.mount(b"tmpfs", covered, b"tmpfs", 0, None)
    ):
        return
    with open(source, "w") as file:
        for number, address in enumerate(addresses):
            file.write(f"{address} host{number}\n::ffff:{address} host{number}\n")  # also as a socket for IPv6 has it
        file.write(lines)
    libc.mount(source.encode(), _HOSTS.encode(), None, _MS_BIND, None)
    libc.umount2(covered, _MNT_DETACH)


if __name__ == "__main__":
    main(*sys.argv[1:])
