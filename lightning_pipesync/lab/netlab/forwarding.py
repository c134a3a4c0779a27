"""Starts the program that forwards the packets of hosts whose links have delays, jitter or loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pipesync.lab.netlab import enter, forwarder
from lightning_pipesync.lab.netlab.processes import NAMESPACES


def check_devices() -> None:
    """Raises RuntimeError, which names what is missing, if no TUN device can be made here."""
    try:
        os.close(os.open(forwarder.DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise RuntimeError(
            f"Delays, jitter and loss need TUN devices (CONFIG_TUN), and this process cannot open {forwarder.DEVICE}: "
            f"{error.strerror}. A container needs --device {forwarder.DEVICE}."
        ) from error


def start(namespace: str, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Starts the forwarder in a network namespace, and waits until all hosts have an interface.

    It dies with this process. ``settings`` is what it reads. RuntimeError if the kernel refuses an interface.
    """
    program = [sys.executable, "-I", "-S"]
    inside = [*program, str(Path(enter.__file__)), str(NAMESPACES / namespace), str(os.getpid())]
    process = subprocess.Popen(
        [*inside, *program, str(Path(forwarder.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C interrupts this process only, which ends the forwarder.
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as pipe, process.stdout as output:
        pipe.write(json.dumps(settings).encode())
        pipe.close()
        said = output.readline().decode().strip()
    if said != forwarder.READY:
        process.kill()
        process.wait()
        raise RuntimeError(f"The forwarder of packets does not start: {said or 'it says nothing'}.")
    return process
