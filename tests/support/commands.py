"""Runs commands together, as several machines would; a hang is a failure, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from tests.support.harness import default_signals, free_port, launch, slots

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
    *commands: tuple[Sequence[object], Mapping[str, str]], timeout_s: float = 300, ranks: int = 2
) -> list[subprocess.CompletedProcess[str]]:
    """Runs each command in its environment, all at the same time, from the root of the repository.

    They start ``ranks`` processes, for which there is room on the machine before they begin.

    Returns:
        Of each its status, and what it has written to both outputs, as ``stdout``.

    Raises:
        AssertionError: one did not end in time.
    """
    with slots(ranks), tempfile.TemporaryDirectory() as folder:
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


def launched(
    *commands: tuple[str, Sequence[object]], folder: Path, ranks: int = 2, **environment: str
) -> tuple[list[int], str]:
    """Runs launchers at the same time, in forked processes that have imported what they need.

    Args:
        commands: ``pipesync``, ``accelerate`` (launch) or ``torchrun``, each with its arguments.
        ranks: how many processes they start.

    Returns:
        Their exit statuses, and what they and their workers wrote; none of these is left running.
    """
    mark = uuid4().hex
    variables = {**environment, "OMP_NUM_THREADS": "1", "TEST_LAUNCH": mark}
    given = [(program, [str(word) for word in words]) for program, words in commands]
    try:
        # The ranks that do nothing keep the places of the processes that are started.
        statuses = launch(_run_launcher, len(commands) + ranks, given, folder, variables, init=False)
    finally:
        left = processes_of(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, left
    return statuses[: len(commands)], "".join((folder / str(rank)).read_text() for rank in range(len(commands)))


def _run_launcher(commands: list[tuple[str, list[str]]], folder: Path, environment: dict[str, str]) -> int:
    """Runs the command of this rank in this process, as a launcher; returns its exit status."""
    number = int(os.environ["RANK"])
    if number >= len(commands):
        return 0
    program, arguments = commands[number]
    output = (folder / str(number)).open("w")
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    try:
        if program == "pipesync":
            from lightning_pipesync.cli import main

            return main(arguments)
        if program == "accelerate":
            from accelerate.commands.launch import launch_command, launch_command_parser

            launch_command(launch_command_parser().parse_args(arguments))
        else:
            from torch.distributed.run import main as torchrun

            torchrun(arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def processes_of(mark: str) -> list[int]:
    """Returns the living processes in whose environment a launch is marked."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            environment = (status.parent / "environ").read_bytes().split(b"\0")
            if f"TEST_LAUNCH={mark}".encode() in environment and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(status.parent.name))
    return found
