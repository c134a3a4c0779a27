"""``python -m tests.drill``: see :class:`Drill`."""

from __future__ import annotations

import sys

from lightning_pipesync import cli
from tests.drill.command import Drill


def main(words: list[str]) -> int:
    """Drills with these options, as of ``pipesync``; returns the exit status."""

    def run() -> int:
        options = cli.import_modules(words)
        return int(cli.parse(Drill, cli.with_lists(options, Drill), prog="python -m tests.drill").run())

    return cli.exit_status(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
