"""``python -m benchmarks.NAME``: runs a benchmark by the parser of ``pipesync``."""

from __future__ import annotations

import sys
from pkgutil import resolve_name

from lightning_pipesync import cli
from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.lab.bench.benchmark import Command


def main(place: str, words: list[str] | None = None) -> int:
    """Runs the benchmark at ``MODULE:CLASS`` with these options, or those of this process; returns the exit status.

    The class is imported by name, so that the ranks find it: in the module that Python runs it is ``__main__``'s.
    """

    def run() -> None:
        options = cli.import_modules(list(sys.argv[1:] if words is None else words))
        module, _, _ = place.partition(":")
        check_extra("test", f"python -m {module}", "matplotlib", "pyroute2", "rich", "scipy", "sklearn", "PIL")
        benchmark: type[Command] = resolve_name(place)
        cli.parse(benchmark, cli.with_lists(options, benchmark), prog=f"python -m {module}").run()

    return cli.exit_status(run)
