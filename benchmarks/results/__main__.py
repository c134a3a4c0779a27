from __future__ import annotations

import sys

from benchmarks.results.command import SUBCOMMANDS, List, Measure, Write
from lightning_pipesync import cli


def run() -> int:
    words = sys.argv[1:]
    if words and words[0] in SUBCOMMANDS:
        words = cli.with_lists(words, SUBCOMMANDS[words[0]])
    command: Measure | List | Write = cli.parse(SUBCOMMANDS, words, prog="python -m benchmarks.results")
    return command.run()


if __name__ == "__main__":
    sys.exit(cli.exit_status(run))
