"""A benchmark: the options of its command are its fields, which all ranks get; it runs, and shows what it measured."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from lightning_pipesync.lab.bench.job import Hosts, Measure, launched, run_job
from lightning_pipesync.lab.bench.tables import check_folder, environment, show, write_results
from lightning_pipesync.lab.netlab.options import LinkOptions

#: Called with a description after each part of a benchmark.
Progress = Callable[[str], object]


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
        self._all_hosts()

    @property
    @abstractmethod
    def num_measurements(self) -> int:
        """How often :meth:`measure` reports progress."""

    @abstractmethod
    def measure(self, progress: Progress) -> dict[str, Any]:
        """Returns what this rank has measured; a collective call."""

    def results(self) -> list[dict[str, Any]]:
        return run_on(type(self).measure, self, self._all_hosts(), self.num_measurements)

    def _all_hosts(self) -> list[Hosts]:
        return make_hosts(self.hosts, self)


_ABOUT_HOSTS = {field.name for field in fields(Benchmark)}


def make_hosts(counts: Sequence[int], links: LinkOptions) -> list[Hosts]:
    """Returns the hosts to run on, for each number of hosts; ValueError if these or the network are wrong."""
    links = LinkOptions(**{field.name: getattr(links, field.name) for field in fields(LinkOptions)})
    for count in counts:
        if count < 2:
            raise ValueError(f"hosts={[*counts]}: a benchmark of communication needs at least 2.")
        if links != LinkOptions():
            links.network(count)  # which refuses what is wrong, before anything has run
    return [Hosts(count, links) for count in counts]


def run_on(measure: Measure, settings: Any, all_hosts: Sequence[Hosts], num_measurements: int) -> list[dict[str, Any]]:
    """Measures on each number of hosts, with a progress bar; returns nothing on a launcher's ranks but the first."""
    if launched() and (given := all_hosts[0].links.in_words()):
        raise ValueError(
            f"{given}: these links are of an emulated network, and a launcher has started this rank, on hosts with "
            "links of their own. Leave them out, or the launcher."
        )
    results = []
    for hosts in all_hosts[:1] if launched() else all_hosts:
        with progress_bar("" if launched() else f"{hosts.count} hosts", num_measurements) as advance:
            result = run_job(measure, settings, hosts, advance)
        if result is not None:
            rate = None if launched() else hosts.links.in_words()
            results.append({**result, "rate": rate, "environment": environment()})
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
