"""A program that has imported all that ranks need, and forks the cases of a drill: processes start in milliseconds.

``python -m tests.drill.server`` reads what to drill from its standard input, as JSON, and prints the
seed of each case that has ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # or libraries start threads when they are imported

import torch

from tests.drill import system
from tests.drill.become import fork, play
from tests.drill.case import Case
from tests.drill.supervisor import Place, record_of, supervise, write_json
from tests.drill.verdict import FAILED, Verdict

#: What a rank would import after the fork: optimizers and process groups of torch do, and what may be missing here.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
)


def serve(order: dict[str, Any]) -> None:
    """Drills cases, several at a time."""
    place = Place(Path(order["folder"]), order["timeout_s"])
    cases = [Case.from_json(case) for case in order["cases"]]
    running: dict[int, Case] = {}
    for case in cases:
        while len(running) >= order["jobs"]:
            await_one(running, place)
        running[fork(partial(supervise, case, place))] = case
    while running:
        await_one(running, place)


def await_one(running: dict[int, Case], place: Place) -> None:
    """Waits for the end of a case, and prints its seed; ends what a case that has died has left."""
    pid, status = os.wait()
    if (case := running.pop(pid, None)) is None:
        return  # a process that lost its supervisor
    if not place.record_of(case).exists():
        why = f"the drill itself died, with status {os.waitstatus_to_exitcode(status)}"
        write_json(place.record_of(case), record_of(case, Verdict(FAILED, why)))
    for child in set(system.children()) - running.keys():
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    print(case.seed, flush=True)


def preload() -> None:
    for name in PRELOADED:
        import_module(name)
    os.environ.setdefault("RUST_LOG", "warn")  # or a lighthouse tells of each round
    with suppress(ImportError):
        import_module("torchft.coordination")
    with suppress(ImportError):
        import_module("lightning_pipesync.lab.netlab.kernel")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each rank's garbage collections copy the memory that it shares


def main() -> None:
    system.die_with_parent()
    system.inherit_orphans()
    order = json.loads(sys.stdin.read())
    for module in order["imports"]:  # which register methods
        import_module(module)
    preload()
    play(partial(serve, order))


if __name__ == "__main__":
    main()
