"""A program: forks the ranks of each job of the table of faults, one of which is lost, and keeps what they print."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # which an optimizer would import after the fork, and so would DDP the next two
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.optim
from transformers import TrainerCallback, TrainingArguments

from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer
from tests.conformance.faults import AT_ONCE, HUNG_S, MEETINGS, NIGHTLY, QUICK, Fault, by_name
from tests.conformance.methods import METHODS
from tests.conformance.runners import train
from tests.conformance.training import Checkpoint, Options
from tests.support.harness import free_port
from tests.support.lost_ranks import be_patient, wait_for
from tests.support.transformers_models import OF_EIGHT_STEPS, Sentences, bert


class Job:
    """A rank of a training with a fault."""

    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        self.fault, self.rank, self.folder = fault, rank, folder
        self.passed: Counter[str] = Counter()
        self.trains: Any = None

    def wait_for_others(self) -> None:
        files = [self.folder / f"{self.fault} {other}.error" for other in self.fault.others]
        wait_for(lambda: all(file.exists() for file in files), HUNG_S)

    def passes(self) -> Callable[[str, Any], Any]:
        """Returns what is called at each place; a function, as a model that has it is copied."""

        def passes(place: str, who: Any) -> Any:
            self.passed[place] += 1
            fault = self.fault
            if place == "batch":
                self.trains = who
            meets = fault.place in MEETINGS
            fifth = place in ("forward", "backward", "batch")
            if place != ("batch" if meets else fault.place) or self.passed[place] != (5 if fifth else 1):
                return None
            if self.rank == fault.victim:
                return self.befall()
            if fault.ranks == 3 and self.rank > 0:
                time.sleep(0.5)  # who is late is not at fault
            return self.meet(who) if meets else None

        return passes

    def meet(self, who: Any) -> None:
        if self.fault.how == "hangs":  # of which the default process group tells nobody before
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.fault.timeout_s))
        if self.fault.place == "gather":
            who.accelerator.gather(torch.ones(1))
        elif self.fault.place == "raw barrier":
            dist.barrier()
        elif self.fault.framework == "fabric":
            who.fabric.barrier()
        else:
            who.trainer.strategy.barrier()

    def befall(self) -> int | None:
        """What befalls the rank; returns what ends an epoch of a Trainer's."""
        how = self.fault.how
        time.sleep(0.1)  # what it has sent is on its way
        if how in ("killed", "frozen", "SIGTERM"):
            numbers = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
            os.kill(os.getpid(), numbers[how])
        elif how == "raises":
            raise KeyError("a bug in the loop")
        elif how == "interrupted":
            raise KeyboardInterrupt
        elif how == "exits":
            sys.exit(0)
        elif how == "hangs":
            self.wait_for_others()
            os._exit(1)
        elif how == "Ctrl-C":
            (self.folder / f"{self.fault}.waits").touch()
            time.sleep(HUNG_S)
        return -1

    def threads(self) -> list[str]:
        """Returns the package's threads that do not end; a call to a store that is frozen may never return."""
        deadline = time.monotonic() + 30
        while True:
            names = {thread.name for thread in threading.enumerate() if "pipesync" in thread.name}
            if self.fault.how == "frozen" and self.fault.victim == 0:
                names -= {"pipesync-heartbeat"}
            if not names or time.monotonic() > deadline:
                return sorted(names)
            time.sleep(0.05)

    def run(self) -> None:
        """Trains until a rank is lost, writes down what this one finds, and ends as a script does."""
        fault = self.fault
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        if fault.ranks > 2 or fault.how == "hangs":  # others than the victim may be held up on a busy machine
            be_patient(6)
        try:
            self.train()
        except BaseException as error:
            threads: list[str] = []
            if fault.detaches and self.trains is not None:
                (getattr(self.trains, "sync", None) or self.trains.engine).detach()
                threads = self.threads()
            file = self.folder / f"{fault} {self.rank}"
            file.with_suffix(".tmp").write_text(json.dumps([type(error).__name__, str(error), threads]))
            file.with_suffix(".tmp").rename(f"{file}.error")
            if self.rank == fault.victim and fault.stays:
                self.wait_for_others()
            if fault.ends:
                raise
            leave(error)

    def train(self) -> None:
        fault = self.fault
        if fault.framework == "plain":
            dist.init_process_group(fault.backend)
        method = METHODS[fault.method]
        pipeline_of_three = method.pipeline and fault.ranks == 3
        settings = fault.settings or ({} if pipeline_of_three else method.typical[0])
        settings = {**settings, "timeout_s": fault.timeout_s}
        if fault.framework == "transformers":
            train_with_transformers(self.passes(), settings, fault, self.folder)
            return
        options = Options(ranks=fault.ranks, ranks_per_replica=fault.ranks // 2 or 1, passes=self.passes())
        save = Checkpoint(self.folder / str(fault), at=3 if fault.place == "saving" else 100)  # or because of the error
        train(fault.framework, method, settings, options, save=save)


def train_with_transformers(
    passes: Callable[[str, Any], Any], settings: dict[str, Any], fault: Fault, folder: Path
) -> None:
    class Passing(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            passes("batch", self)

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            passes("validation", self)

    args = TrainingArguments(str(folder / "transformers"), **{**OF_EIGHT_STEPS, "save_strategy": "no"})
    plugin = PipeSyncPlugin(fault.method, **settings)
    data = Sentences()
    PipeSyncTrainer(
        model=bert(), args=args, train_dataset=data, eval_dataset=data, callbacks=[Passing()], pipesync=plugin
    ).train()


def leave(error: BaseException) -> NoReturn:
    """Ends this process with all that happens before an interpreter is torn down, which takes longest.

    Called while the error is being handled.
    """
    code: Any = 1
    if isinstance(error, SystemExit):
        code = error.code or 0
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def fork_rank(rank: int, port: int, fault: Fault, folder: Path) -> int:
    """Returns the process that a rank runs in; its interpreter ends with this function."""
    child = os.fork()
    if child == 0:
        output = os.open(folder / f"{fault} {rank}.output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(fault.ranks)}
        os.environ.update(of_rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        os.environ.update(LOCAL_WORLD_SIZE=str(fault.ranks), ACCELERATE_USE_CPU="true")
        Job(fault, rank, folder).run()
        sys.exit()
    return child


def run_jobs(faults: list[Fault], folder: Path) -> dict[str, int]:
    """Returns the exit codes by job and rank. Ends a frozen rank once all others of its job have ended."""
    waiting, codes = list(faults), {}
    running: dict[int, tuple[Fault, int]] = {}
    while waiting or running:
        while waiting and len(running) + waiting[0].ranks <= AT_ONCE:
            fault, port = waiting.pop(0), free_port()
            running.update({fork_rank(rank, port, fault, folder): (fault, rank) for rank in range(fault.ranks)})
        for mark in folder.glob("*.waits"):
            mark.unlink()
            for child in [child for child, (fault, _) in running.items() if str(fault) == mark.stem]:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGINT)  # as a terminal does
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.02)
            continue
        fault, rank = running.pop(child)
        codes[f"{fault} {rank}"] = os.waitstatus_to_exitcode(status)
        left = [other for other, (same, _) in running.items() if same == fault]
        if fault.how == "frozen" and [running[other][1] for other in left] == [fault.victim]:
            os.kill(left[0], signal.SIGKILL)
    return codes


def main(folder: Path, names: list[str]) -> None:
    """Args: where all write, and the jobs by the names of their faults."""
    torch.set_num_threads(1)
    gc.freeze()  # or each rank's last garbage collection copies the memory that it shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    table = by_name([*QUICK, *NIGHTLY])
    codes = run_jobs([table[name] for name in names], folder)
    (folder / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
