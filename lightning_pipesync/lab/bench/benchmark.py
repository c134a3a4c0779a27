"""A benchmark: the options of its command are its fields, which all ranks get; it runs, and shows what it measured.

Its ranks are those of a launcher, the hosts of an emulated network, or processes on this machine. Each of these runs
``python -m lightning_pipesync.lab.bench.benchmark MEASUREMENT RESULT``. The file MEASUREMENT has, pickled, a function
that measures, its settings, and the user's methods. Rank 0 writes its result as JSON to the file RESULT, and its
progress in lines that start with PROGRESS.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_pipesync.lab import netlab
from lightning_pipesync.lab.bench.preflight import exchange_facts
from lightning_pipesync.lab.bench.tables import check_folder, environment, show, write_results
from lightning_pipesync.lab.netlab.command import LinkOptions
from lightning_pipesync.lab.netlab.processes import raising_signals
from lightning_pipesync.lab.predictions.registry import lab_of, register_lab
from lightning_pipesync.training.registry import METHODS

#: Called with a description after each part of a benchmark.
Progress = Callable[[str], object]

#: The number of lines of output that an error message quotes.
QUOTED = 20

#: Seconds in which the other ranks end, by themselves or by an error that names the rank that has failed.
GRACE_S = 150.0

#: The prefix of a line of progress on standard output.
PROGRESS = "@progress "

#: How long a rank waits for the others to start.
TIMEOUT = timedelta(minutes=5)

#: Measures on one rank, within an initialized default process group: called with its settings, a dataclass, and with a
#: function to call with a description after each part.
Measure = Callable[[Any, Progress], dict[str, Any]]

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """A command that measures something.

    Attributes:
        output: Folder for the results, as JSON and Markdown, and the pictures.
    """

    output: Path = Path("outputs/bench")

    #: The name of the command and of its files.
    name: ClassVar[str]

    @abstractmethod
    def results(self) -> list[dict[str, Any]]:
        """Measures; returns nothing on the ranks of a launcher other than the first."""

    @abstractmethod
    def report(self, results: list[dict[str, Any]]) -> str:
        """Returns the tables, in Markdown."""

    @abstractmethod
    def draw(self, results: list[dict[str, Any]]) -> None:
        """Writes the pictures to the folder ``output``."""

    def run(self) -> None:
        """Measures, writes the results and the pictures, and prints the tables."""
        if on_first_rank():
            check_folder(self.output)  # an error now, not after all measurements
        if results := self.results():
            show(self.write(results))
            print(f"Results and pictures: {self.output}")

    def write(self, results: list[dict[str, Any]]) -> str:
        """Writes the results, the tables, which are returned, and the pictures."""
        text = self.report(results)
        write_results(self.output, self.name, {"kind": self.name, "results": results}, text)
        self.draw(results)
        return text

    def settings(self) -> dict[str, Any]:
        """Returns what is saved with the results: the fields but for those that say where it runs."""
        return {name: value for name, value in asdict(self).items() if name not in _ABOUT_HOSTS}

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}.")

    def _check_all_positive(self, name: str, values: Sequence[float], what: str) -> None:
        if not values or not all(value > 0 for value in values):
            raise ValueError(f"{name} must be one or more positive {what}, got {values!r}.")


@dataclass(frozen=True, kw_only=True)
class Benchmark(Command, LinkOptions):
    """A command that measures on several ranks.

    Attributes:
        hosts: Numbers of hosts, one rank each. Not used if a launcher has started this process.

    Raises:
        ValueError: an option is out of its range; the message names it and its value.
    """

    hosts: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        check_hosts(self.hosts, self)

    @property
    @abstractmethod
    def num_measurements(self) -> int:
        """How often :meth:`measure` reports progress."""

    @abstractmethod
    def measure(self, progress: Progress) -> dict[str, Any]:
        """Returns what this rank has measured; a collective call."""

    def results(self) -> list[dict[str, Any]]:
        return run_on(type(self).measure, self, self.hosts, self, self.num_measurements)


_ABOUT_HOSTS = {field.name for field in fields(Benchmark)}


def check_hosts(counts: Sequence[int], links: LinkOptions) -> None:
    """Raises ValueError if one of the numbers of hosts, or the network among them, is wrong."""
    for count in counts:
        if count < 2:
            raise ValueError(f"hosts={[*counts]}: a benchmark of communication needs at least 2.")
        if links.in_words() or links.beside_rate():
            links.network(count)  # which refuses what is wrong, before anything has run


def run_on(
    measure: Measure, settings: Any, counts: Sequence[int], links: LinkOptions, num_measurements: int
) -> list[dict[str, Any]]:
    """Measures on each number of hosts, with a progress bar; returns nothing on a launcher's ranks but the first."""
    given = links.in_words()
    if launched() and given:
        raise ValueError(
            f"{given}: these links are of an emulated network, and a launcher has started this rank, on hosts with "
            "links of their own. Leave them out, or the launcher."
        )
    results = []
    for count in counts[:1] if launched() else counts:
        with progress_bar("" if launched() else f"{count} hosts", num_measurements) as advance:
            result = run_job(measure, settings, count, links, advance)
        if result is not None:
            results.append({**result, "rate": given, "environment": environment()})
    return results


def on_first_rank() -> bool:
    """Returns whether no launcher has started this process, or as its first rank."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Progress]:
    """Shows a progress bar on the first rank; yields a function to call with a description after each part."""
    from rich import progress
    from rich.console import Console

    shown = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    columns = (progress.TextColumn(name), *shown, progress.TextColumn("{task.description}"))
    with progress.Progress(*columns, console=Console(stderr=True), disable=not on_first_rank()) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def launched() -> bool:
    """Returns whether a launcher (torchrun, ``pipesync netlab``) has started this process as a rank.

    ValueError if ``srun`` has started it, which sets other variables than torch's: each task would plan for itself.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
        raise ValueError(
            f"srun has started {tasks} tasks of this command, which would not know of each other. Start torchrun once "
            "on each node, with its number of GPUs: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
            "--nproc-per-node=... --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29400 -m lightning_pipesync ..."
        )
    return False


def run_job(
    measure: Measure, settings: Any, num_hosts: int, links: LinkOptions, progress: Progress
) -> dict[str, Any] | None:
    """Runs a benchmark and returns rank 0's result; None on the other ranks that a launcher has started.

    Without a rate of ``links`` the hosts are processes on this machine, which talk over loopback.

    Raises:
        RuntimeError: a rank failed (the message quotes its last lines), or the machine cannot emulate a network.
        ValueError: the settings of the network are invalid.
    """
    if launched():
        return run_rank(measure, settings, progress)
    with TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        of_user = {
            method: type(lab_of(name))
            for name, method in METHODS.items()
            if method.__module__.partition(".")[0] not in (_PACKAGE, "__main__")
        }
        measurement = Path(directory) / "measurement"
        measurement.write_bytes(pickle.dumps((measure, settings, of_user)))
        command = [sys.executable, "-m", f"{_PACKAGE}.lab.bench.benchmark", str(measurement), str(result)]
        last: deque[str] = deque(maxlen=QUOTED)

        def on_line(rank: int, line: str) -> None:
            if line.startswith(PROGRESS):
                progress(line.removeprefix(PROGRESS).strip())
            else:
                last.append(f"rank {rank}: {line.rstrip()}")

        if links.rate is None:
            status = _run_here(command, num_hosts, on_line)
        else:
            with links.network(num_hosts) as network:
                status = netlab.run_job(network, command, output=on_line)
        if status or not result.exists():
            raise RuntimeError("\n".join([f"The benchmark ended with exit status {status}.", *last]))
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def _run_here(command: list[str], num_ranks: int, on_line: Callable[[int, str], object]) -> int:
    """Runs ``command`` as ``num_ranks`` ranks on this machine; returns the first exit status that is not 0, else 0.

    When one has ended, the others are killed after :data:`GRACE_S`. The store is in this process, as under torchrun: a
    port that is only reserved for rank 0's store may be taken before, even by a rank that connects to itself there.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_ranks)}
    shared = {**os.environ, **shared, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks: list[subprocess.Popen[str]] = []

    def show(rank: int) -> int:
        for line in ranks[rank].stdout or ():
            on_line(rank, line)
        return ranks[rank].wait()

    with raising_signals(), ThreadPoolExecutor(num_ranks) as pool:
        try:
            for rank in range(num_ranks):
                variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=variables, **pipes))
            statuses = [pool.submit(show, rank) for rank in range(num_ranks)]
            wait(statuses, return_when=FIRST_COMPLETED)
            wait(statuses, timeout=GRACE_S)
        finally:
            for process in ranks:
                process.kill()
        return next(filter(None, (status.result() for status in statuses)), 0)


def run_rank(measure: Measure, settings: Any, progress: Progress) -> dict[str, Any] | None:
    """Runs a benchmark as the rank of the environment; returns the result on rank 0."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    exchange_facts(store, rank, world_size)
    cuda, backend = getattr(settings, "device", "cpu") == "cuda", getattr(settings, "backend", "nccl")
    if cuda:
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus and (backend == "nccl" or not num_gpus):
            raise ValueError(f"Rank {rank} is for GPU {local_rank} of its host, which has {num_gpus}.")
        torch.cuda.set_device(local_rank % num_gpus)
    backends = f"cpu:gloo,cuda:{backend}" if cuda else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size)
    leader = dist.get_rank() == 0
    measured = measure(settings, progress if leader else lambda text: None)
    dist.barrier()
    dist.destroy_process_group()
    return measured if leader else None


def main(measurement: str, result: str) -> None:
    measure, settings, of_user = pickle.loads(Path(measurement).read_bytes())
    for method, entry in of_user.items():
        METHODS[method.name] = method
        register_lab(method, entry)
    torch.set_num_threads(1)  # the processes of all emulated hosts share this machine
    measured = run_rank(measure, settings, lambda text: print(PROGRESS + text, flush=True))
    if measured is not None:
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
