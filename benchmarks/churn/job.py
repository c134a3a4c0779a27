"""Replicas that are killed and started again at once, and the proof of each kill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.churn.log import read
from benchmarks.churn.replica import end_with_parent
from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME, NUMBER

#: What torchrun says of a worker that SIGKILL has ended.
KILLED = re.compile(rf"exitcode: -{signal.SIGKILL:d}\) local_rank: \d+ \(pid: (\d+)\)")

#: Seconds that torchrun has to end its workers.
GRACE_S = 20.0


@dataclass(frozen=True)
class Exit:
    """The end of a process that was started here; ``status`` is -n after signal n."""

    time: float
    replica: int
    pid: int
    status: int


@dataclass(frozen=True)
class Killed:
    """A process that SIGKILL was sent to."""

    time: float
    replica: int
    pid: int


class Job:
    """Processes that are started again at once when they end, and write logs and what they print to a folder.

    Attributes:
        exits: of the processes that have ended so far.
        kills: those sent so far.
    """

    def __init__(self, folder: Path, replicas: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.replicas = folder, replicas
        self.exits: list[Exit] = []
        self.kills: list[Killed] = []
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def logs(self) -> list[Path]:
        return [self.folder / f"{replica}.jsonl" for replica in range(self.replicas)]

    def start(self) -> None:
        """Starts all that does not run."""
        raise NotImplementedError

    def poll(self) -> None:
        """Starts again what has ended."""
        for number, process in list(self._started.items()):
            status = process.poll()
            if status is not None:
                self.exits.append(Exit(time.monotonic(), number, process.pid, status))
                del self._started[number]
        self.start()

    def kill(self, replica: int) -> bool:
        """Kills the process that has written last to the log of a replica; returns False if there is none now."""
        lines = read(self.logs[replica])
        if not lines or lines[-1].pid in {kill.pid for kill in self.kills}:
            return False
        try:
            os.kill(lines[-1].pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills.append(Killed(time.monotonic(), replica, lines[-1].pid))
        return True

    def proven(self) -> set[int]:
        """Returns the processes that have ended by SIGKILL."""
        return {one.pid for one in self.exits if one.status == -signal.SIGKILL}

    def end(self) -> None:
        """Ends all processes."""
        for process in self._started.values():
            process.kill()
        for process in self._started.values():
            process.wait()

    def said(self, lines: int = 20) -> str:
        """Returns the last lines that the processes have printed."""
        path = self.folder / "output.txt"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def as_json(self) -> dict[str, object]:
        return {"exits": [asdict(one) for one in self.exits], "kills": [asdict(one) for one in self.kills]}

    def _start(self, number: int, words: Sequence[str], **variables: str) -> None:
        with (self.folder / "output.txt").open("ab") as output:
            self._started[number] = subprocess.Popen(
                [sys.executable, "-m", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C interrupts this process only, which ends the others
                preexec_fn=end_with_parent,
            )


class Replicas(Job):
    """A process for each replica, which finds a lighthouse at ``address``."""

    def __init__(self, folder: Path, replicas: int, settings: str, address: str) -> None:
        super().__init__(folder, replicas)
        self._settings, self._variables = settings, {ADDRESS: address, NUMBER: str(replicas)}

    def start(self) -> None:
        for replica in range(self.replicas):
            if replica not in self._started:
                words = ["benchmarks.churn.replica", self._settings, str(self.folder)]
                self._start(replica, words, **self._variables, **{NAME: str(replica)})


class Ranks(Job):
    """The ranks of torchrun, which starts all of them again when one has ended."""

    def __init__(self, folder: Path, replicas: int, settings: str) -> None:
        super().__init__(folder, replicas)
        self._settings = settings

    def start(self) -> None:
        if not self._started:
            options = ["--standalone", "--nproc-per-node", str(self.replicas), "--max-restarts", "1000000"]
            module = ["-m", "benchmarks.churn.replica", self._settings, str(self.folder)]
            # Otherwise ranks that are started again find the addresses of dead ones, and cannot connect.
            self._start(0, ["torch.distributed.run", *options, *module], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def proven(self) -> set[int]:
        output = (self.folder / "output.txt").read_text(errors="replace")
        return {int(pid) for pid in KILLED.findall(output)}

    def end(self) -> None:
        for process in self._started.values():
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its workers end with it
                process.wait()
