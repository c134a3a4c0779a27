"""Runs commands together, as several machines would; a hang is a failure, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.harness import default_signals, free_port

ROOT = Path(__file__).parents[2]
#: What a launcher sets, and a test session may have been given itself.
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "PET_", "TORCHELASTIC_")


def environment(**variables: object) -> dict[str, str]:
    """Returns this process's environment without what a launcher has set, and with ``variables``.

    The package is found, and so are the programs that are installed with it, as in an environment that was activated.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    packages = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PYTHONPATH": packages, "PATH": programs, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return kept | own | {name: str(value) for name, value in variables.items()}


def run_together(
    *commands: tuple[Sequence[object], Mapping[str, str]], timeout_s: float = 200
) -> list[subprocess.CompletedProcess[str]]:
    """Runs each command in its environment, all at the same time, from the root of the repository.

    Returns:
        Of each its status, and what it has written to both outputs, as ``stdout``.

    Raises:
        AssertionError: one did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(len(commands))]
        running: list[subprocess.Popen[str]] = []
        try:
            for (words, variables), output in zip(commands, outputs, strict=True):
                running.append(
                    subprocess.Popen(
                        [str(word) for word in words],
                        env=variables,
                        cwd=ROOT,
                        stdout=output.open("w"),
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        text=True,
                        start_new_session=True,
                        preexec_fn=default_signals,
                    )
                )
            deadline = time.monotonic() + timeout_s
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            texts = [output.read_text() for output in outputs]
            hung = [text for process, text in zip(running, texts, strict=True) if process.poll() is None]
            assert not hung, f"{len(hung)} of {len(commands)} commands hang. The first wrote:\n{hung[0]}"
        finally:
            for process in running:
                with suppress(ProcessLookupError):  # also what a command that has ended has left behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, text)
        for process, text in zip(running, texts, strict=True)
    ]


def two_machines(
    launcher: str, script: Sequence[object], **variables: object
) -> list[tuple[list[object], dict[str, str]]]:
    """Returns what runs ``script`` by ``launcher`` of integrations/torchrun on two machines, both of them this one."""
    port = free_port()
    endpoint = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "RDZV_ID": "test",
    }
    command = [ROOT / "integrations" / "torchrun" / launcher, *script]
    return [(command, environment(**endpoint, NODE_RANK=rank, **variables)) for rank in range(2)]
