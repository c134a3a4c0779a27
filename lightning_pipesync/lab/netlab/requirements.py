"""The requirements of the emulation, checked before anything is created."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

#: Capabilities and their bits in the kernel's masks: links and queues need the first, entering a namespace the second.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


def check_requirements() -> None:
    """Raises RuntimeError if this is not Linux, not root, or without network namespaces or pyroute2."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"A network of hosts can be emulated on Linux only; this is {sys.platform}.")
    if importlib.util.find_spec("pyroute2") is None:
        raise RuntimeError("pyroute2 is missing: pip install 'lightning-pipesync[bench]'.")
    missing = missing_capabilities()
    if missing:
        raise RuntimeError(
            f"Network namespaces need root: this process lacks {' and '.join(missing)}. Run it with sudo, or in a "
            "privileged container."
        )
    if not Path("/proc/self/ns/net").exists():
        raise RuntimeError("This kernel has no network namespaces (CONFIG_NET_NS).")


def missing_capabilities() -> list[str]:
    """Returns the names of the required capabilities that this process lacks."""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
