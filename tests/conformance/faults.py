"""A program: forks two ranks for each job, one of which is lost within a step, and lets all of them end as they do.

They end as scripts of users do, with all that happens at an interpreter's shutdown: the ranks of the harness do not.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # which an optimizer would import after the fork, and so would DDP the next two
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.optim

from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.support.harness import free_port
from tests.support.lost_ranks import be_patient

#: Seconds after which a method counts a rank as lost, where that is how it is found out; otherwise far longer.
HANG_TIMEOUT_S, TIMEOUT_S = 20, 300
#: Seconds after which a rank that is still there has hung: it prints its stacks, and ends.
HUNG_S = 250
#: What befalls rank 1 of the jobs that run at the same time.
WAVES = (("killed",), ("hangs", "raises"), ("interrupted",))


def wait_for_signal(mark: Path) -> None:
    """Waits within the step, and so has rank 0 wait for this one, until all ranks are interrupted."""
    mark.touch()
    time.sleep(HUNG_S)


def hang(found: Path) -> None:
    """Hangs until the other rank has found it: that one must not wait for its end."""
    while not found.exists():
        time.sleep(0.1)
    os._exit(1)


def raise_error() -> None:
    raise KeyError("a bug in the loop")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(job: str, folder: Path) -> None:
    """Trains until rank 1 is lost, writes down what this rank finds, and raises it."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    be_patient()
    how, framework, name = job.split()
    fault = {
        "killed": kill,
        "hangs": partial(hang, folder / f"{job} 0"),
        "raises": raise_error,
        "interrupted": partial(wait_for_signal, folder / f"{job} waits"),
    }[how]
    if framework == "plain":
        dist.init_process_group("gloo")
    method = METHODS[name]
    settings = {**method.typical[0], "timeout_s": HANG_TIMEOUT_S if how == "hangs" else TIMEOUT_S}
    try:
        save = Checkpoint(folder / job, at=100)  # if at all, because of the error
        train(framework, method, settings, Options(fault=fault), save=save)
    except Exception as error:
        found = folder / f"{job} {os.environ['RANK']}"
        found.write_text(json.dumps([type(error).__name__, str(error)]))
        raise


def fork_rank(rank: int, port: int, job: str, folder: Path) -> int:
    """Returns the process that a rank runs in; its interpreter ends with this function."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
        os.environ.update(of_rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        run_rank(job, folder)
        sys.exit()
    return child


def main(folder: Path, jobs: list[str]) -> None:
    """Args: where all write, and the jobs: what befalls rank 1, the framework and the method."""
    torch.set_num_threads(1)
    gc.freeze()  # or each rank's last garbage collection copies the memory that it shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codes = {}
    for wave in WAVES:
        children = {}
        for job in jobs:
            if job.split()[0] in wave:
                port = free_port()
                children.update({fork_rank(rank, port, job, folder): f"{job} {rank}" for rank in (0, 1)})
        while children:
            child, status = os.wait()
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
    (folder / "exit codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
