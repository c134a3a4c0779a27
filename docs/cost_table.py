"""Writes the cost model's table of servers and all-reduces into docs/benchmarks_appendix.md, by number of ranks.

Usage: python docs/cost_table.py
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost

PAGE = Path(__file__).parent / "benchmarks_appendix.md"
BEGIN, END = "<!-- cost model: written by docs/cost_table.py -->", "<!-- end of cost model -->"

#: 10 Gbit/s, and 50 microseconds per message.
LINK = LinkCost(alpha=50e-6, beta=8 / 10e9)
NUM_BYTES = 100 * MIB


def table() -> str:
    """Returns the table, in seconds."""
    columns = ["central server", "servers on half of the ranks", "servers on all ranks", "ring", "2-D torus"]
    lines = [f"| ranks | {' | '.join(columns)} | double binary tree |", "|" + "---:|" * 7]
    for ranks in (4, 16, 256, 4096):
        side = math.isqrt(ranks)
        seconds = [
            LINK.central_server(NUM_BYTES, ranks),
            LINK.sharded_servers(NUM_BYTES, ranks, servers=ranks // 2),
            LINK.sharded_servers(NUM_BYTES, ranks),
            LINK.all_reduce(NUM_BYTES, ranks),
            2 * LINK.torus_half(NUM_BYTES, side, side),
            LINK.double_tree(NUM_BYTES, ranks),
        ]
        lines.append("| " + " | ".join([str(ranks), *(f"{value:.3f}" for value in seconds)]) + " |")
    return "\n".join(lines)


def page_with_table() -> str:
    """Returns the page with an up-to-date table."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
