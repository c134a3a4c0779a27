"""``pipesync launch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME, NUMBER
from lightning_pipesync.core.jobs import shared_environment
from lightning_pipesync.launch.launcher import Launcher, say
from lightning_pipesync.launch.lighthouse import Lighthouse

#: What another launcher has set, which a replica must not take for its own.
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS_PER_NODE"),
)
#: Options that are those of the lighthouse.
_OF_LIGHTHOUSE = ("min_replicas", "heartbeat_timeout_s", "join_timeout_s")
#: Says which GPUs a process may use.
_DEVICES = "CUDA_VISIBLE_DEVICES"
#: Words before the script that have no value after them.
_FLAGS = {"-h", "--help", "--print_config"}


@dataclass
class Launch:
    """Starts replicas, jobs that come and go: --replicas N SCRIPT; or accelerate launch: --config_file FILE SCRIPT.

    A script with local SGD finds the lighthouse, where its replicas meet, by itself. Without --replicas all
    options are those of accelerate launch, which gets a method and its settings from the file's section 'pipesync'.

    Attributes:
        replicas: How many are started here. The GPUs of this machine are shared out between them.
        ranks_per_replica: Processes of each. A single one is a plain python train.py; several are started by torchrun.
        lighthouse: HOST:PORT of a lighthouse that runs elsewhere (pipesync lighthouse), for replicas on several
            machines. By default one runs here, for these replicas alone.
        first_replica: The number of the first one, if other machines start others. In a step of Slurm with several
            tasks it follows from the task.
        num_replicas: How many there must be before training begins, on all machines. By default those that are started
            here, or by the tasks of this Slurm step; with --lighthouse, elsewhere than in Slurm, the first begins.
        max_restarts: How often each replica is started again after it has died. One that ends with 0 is done.
        backoff_s: Seconds before its first restart; twice as many before each further one, up to a minute.
        grace_s: Seconds that the replicas have to leave after SIGTERM or Ctrl-C, before they are killed.
        log_dir: Folder to which the output of each replica is added, as replica-0.log.
        min_replicas: Of the lighthouse: how many replicas there must be for a round, at any time.
        heartbeat_timeout_s: Of the lighthouse: seconds without a sign of life after which a replica counts as lost.
        join_timeout_s: Of the lighthouse: seconds that the others wait for a replica that is alive, and does not come
            to a round. More than the longest round.
        command: The script and its arguments; written after the options, without a name.
    """

    replicas: int
    ranks_per_replica: int = 1
    lighthouse: str | None = None
    first_replica: int | None = None
    num_replicas: int | None = None
    max_restarts: int = 3
    backoff_s: float = 1.0
    grace_s: float = 30.0
    log_dir: Path | None = None
    min_replicas: int = Lighthouse.min_replicas
    heartbeat_timeout_s: float = Lighthouse.heartbeat_timeout_s
    join_timeout_s: float = Lighthouse.join_timeout_s
    command: Sequence[str] = ()

    def run(self) -> int:
        """Runs the replicas; returns the exit status of the launcher.

        Raises:
            ValueError: an option or the script is wrong; nothing was started.
        """
        self._check()
        first, number = self._numbers()
        shares = share_devices(self.replicas, self.ranks_per_replica)
        has_all = self.lighthouse is None and self.replicas > 1
        launcher = Launcher(self.max_restarts, self.backoff_s, self.grace_s, self.log_dir, has_all)
        with ExitStack() as stack:
            address = self.lighthouse
            if address is None:
                address = f"127.0.0.1:{stack.enter_context(self._own_lighthouse().serving())}"
            shared = shared_environment(self.replicas * self.ranks_per_replica)
            shared = {name: value for name, value in shared.items() if name not in _OF_LAUNCHERS}
            shared |= {ADDRESS: address} | ({} if number is None else {NUMBER: str(number)})
            for replica, devices in enumerate(shares, start=first):
                own = {NAME: str(replica)} | ({} if devices is None else {_DEVICES: devices})
                launcher.add(replica, self._words(), shared | own)
            numbers = f"replica {first}" if len(shares) == 1 else f"replicas {first} to {first + len(shares) - 1}"
            say(f"starts {numbers}, with the lighthouse {address}.")
            return launcher.run()

    def _words(self) -> list[str]:
        """Returns the command of a replica."""
        if self.ranks_per_replica == 1:
            return [sys.executable, *self.command]
        ranks = ("--standalone", "--nproc_per_node", str(self.ranks_per_replica), "--max_restarts", "0")
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *self.command]

    def _check(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ValueError("pipesync launch --replicas needs Linux: start each replica as a job of its own.")
        lowest = {"replicas": 1, "ranks_per_replica": 1, "first_replica": 0, "num_replicas": 1}
        lowest |= {"max_restarts": 0, "backoff_s": 0, "grace_s": 0}
        for name, bound in lowest.items():
            if (value := getattr(self, name)) is not None and not value >= bound:
                raise ValueError(f"--{name} must be at least {bound}, got {value}.")
        self._own_lighthouse().check()
        if self.lighthouse is not None:
            self._check_lighthouse(self.lighthouse)
        script = next(iter(self.command), None)
        if script is None or self.command == ["-m"]:
            raise ValueError("There is no script: pipesync launch --replicas 4 train.py.")
        if script != "-m" and not Path(script).is_file():
            raise ValueError(f"There is no file {script}, the script that each replica runs.")

    def _own_lighthouse(self) -> Lighthouse:
        return Lighthouse(0, "127.0.0.1", **{name: getattr(self, name) for name in _OF_LIGHTHOUSE})

    def _check_lighthouse(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--lighthouse must be HOST:PORT, such as machine0:29510, got {address!r}.")
        for name in _OF_LIGHTHOUSE:
            if (value := getattr(self, name)) != getattr(Lighthouse, name):
                raise ValueError(
                    f"--{name} {value} is for a lighthouse that runs here; the one at {address} has its own: "
                    f"pipesync lighthouse --{name} {value}."
                )

    def _numbers(self) -> tuple[int, int | None]:
        """Returns the number of the first replica here, and how many there must be before training begins."""
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if self.lighthouse is None and tasks > 1:
            raise ValueError(
                f"Each of the {tasks} tasks of this Slurm step would have a lighthouse of its own: run pipesync "
                "lighthouse on one of the machines, and give its address to all by --lighthouse HOST:PORT."
            )
        first, number = 0, self.replicas if self.lighthouse is None else None
        if tasks > 1:
            first, number = int(os.environ["SLURM_PROCID"]) * self.replicas, tasks * self.replicas
        return (
            first if self.first_replica is None else self.first_replica,
            number if self.num_replicas is None else self.num_replicas,
        )


def share_devices(replicas: int, ranks_per_replica: int) -> list[str | None]:
    """Returns the value of ``CUDA_VISIBLE_DEVICES`` for each replica; None on a machine without GPUs.

    Each replica gets as many, in order; some may be left.

    Raises:
        ValueError: there are GPUs, and fewer than ranks.
    """
    if (given := os.environ.get(_DEVICES)) is None:
        devices = [str(index) for index in range(torch.cuda.device_count())]
    else:  # CUDA takes those before the first that there cannot be, such as -1
        names = filter(None, map(str.strip, given.split(",")))
        devices = [*takewhile(lambda name: not name.startswith("-"), names)]
    if not devices:
        return [None] * replicas
    each = len(devices) // replicas
    if each < ranks_per_replica:
        raise ValueError(
            f"--replicas {replicas} --ranks_per_replica {ranks_per_replica} needs {replicas * ranks_per_replica} GPUs, "
            f"and there are {len(devices)}: start fewer here, or set {_DEVICES}= to train on the CPU."
        )
    return [",".join(devices[number * each : (number + 1) * each]) for number in range(replicas)]


def starts_replicas(words: Sequence[str]) -> bool:
    """Returns whether the words after ``pipesync launch`` start replicas, or ask for help."""
    options, _ = split_command(words)
    return not words or any(option.partition("=")[0] in ("--replicas", "-h", "--help") for option in options)


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the options, and the script with its arguments."""
    cut = 0
    while cut < len(words) and (words[cut].startswith("--") or words[cut] in _FLAGS):
        if words[cut] == "--":
            return list(words[:cut]), list(words[cut + 1 :])
        cut += 1 if "=" in words[cut] or words[cut] in _FLAGS else 2
    return list(words[:cut]), list(words[cut:])
