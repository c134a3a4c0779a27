"""Runs random configurations until the time is over: ``python -m tests.fuzz --seconds 3600``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.fuzz.batch import RUNS, reproduction, run_batch
from tests.fuzz.methods import METHODS_OF_SHARDS
from tests.fuzz.outcome import FAILED

#: Configurations of one launch.
BATCH = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--method", choices=list(RUNS), action="append", help="only this method; may be repeated")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (%(default)s)")
    parser.add_argument("--shards", type=int, help="number of ranks among which FSDP2 shards each replica (whole ones)")
    parser.add_argument("--only", type=int, metavar="SEED", help="the configuration of this seed alone")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    end, first = time.monotonic() + arguments.seconds, arguments.seed
    while True:
        seeds = list(range(first, first + BATCH)) if arguments.only is None else [arguments.only]
        for method in arguments.method or (RUNS if arguments.shards is None else METHODS_OF_SHARDS):
            for outcome in run_batch(method, seeds, arguments.ranks, arguments.shards):
                counts[method, outcome.kind] += 1
                if outcome.kind == FAILED:
                    print(f"\n{reproduction(method, arguments.ranks, outcome, arguments.shards)}", flush=True)
        first += BATCH
        if arguments.only is not None or time.monotonic() > end:
            break
    print(table(counts))
    return int(any(kind == FAILED for _, kind in counts))


def table(counts: Counter[tuple[str, str]]) -> str:
    """Returns counts by method and outcome."""
    kinds = sorted({kind for _, kind in counts})
    methods = dict.fromkeys(method for method, _ in counts)
    rows = [["", *kinds], *([method, *(str(counts[method, kind]) for kind in kinds)] for method in methods)]
    return "\n".join("  ".join(cell.rjust(24) for cell in row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
