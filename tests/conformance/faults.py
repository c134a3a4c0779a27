"""The table of faults: what befalls a rank, and where; all others name it, and every process ends by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.conformance.cases import PAIRS
from tests.conformance.methods import METHODS
from tests.support.harness import default_signals, slots

#: Seconds after which a method counts a rank as lost, where that is how it is found out; otherwise far longer.
SHORT_TIMEOUT_S, TIMEOUT_S = 10, 300
#: Seconds after which a rank that is still there has hung: it prints its stacks, and ends.
HUNG_S = 250
#: Ranks that run at once, of which most only wait: half as many count for the machine.
AT_ONCE = 8

#: What befalls a rank, and what the last line of the others' errors says of it.
SAYS = {
    "killed": "has died",
    "frozen": "is frozen",
    "hangs": "is alive, and has not joined",
    "raises": "it raised KeyError: 'a bug in the loop'",
    "interrupted": "it raised KeyboardInterrupt",
    "exits": "it has ended without an error",
    "SIGTERM": "it raised SIGTERMException",
    "ends its epoch": "it has ended its epoch after",
    "Ctrl-C": "",  # all ranks are interrupted, and none is at fault
}
#: With which exit codes that rank ends. Lightning exits as it likes after a SIGTERM, and Gloo may abort rank 0, seldom,
#: if it is interrupted while it waits for another.
CODES: dict[str, tuple[int, ...]] = {
    "killed": (-signal.SIGKILL,),
    "frozen": (-signal.SIGKILL,),
    "exits": (0,),
    "interrupted": (-signal.SIGINT,),
    "SIGTERM": (0, 1, 128 + signal.SIGTERM),
    "Ctrl-C": (1, -signal.SIGINT),
}
#: Where all ranks meet in the default process group: how the framework does, in a call of the loop's own, or in a
#: collective of Accelerate's.
MEETINGS = ("barrier", "raw barrier", "gather")


@dataclass(frozen=True)
class Fault:
    """What befalls a rank of a training.

    Args:
        framework: also ``"transformers"``.
        method: with the first of its typical settings, or ``settings``.
        place: where: before the method is attached (``"attach"``), in the fifth ``"forward"`` or ``"backward"`` pass,
            before the fifth ``"batch"``, where all ranks may meet, see :data:`MEETINGS`; in a callback
            (``"validation"``), before a checkpoint is saved (``"saving"``), or when the training ends (``"end"``).
        how: a key of :data:`SAYS`.
        victim: the rank.
        ranks: their number. Of three, one is late; in a plain loop they detach their methods, and a rank that raises
            does not end before the others, so that no connection breaks. Four are two replicas, sharded by FSDP2.
        settings: of the method.
        backend: of the default process group of a plain loop.
        ends: whether its interpreters end as that of a script does, which takes long; otherwise each process exits
            when it has printed its error, and all is done that is registered with ``atexit``.
    """

    framework: str
    method: str
    place: str
    how: str
    victim: int = 1
    ranks: int = 2
    settings: dict[str, Any] | None = None
    backend: str = "gloo"
    ends: bool = False

    def __str__(self) -> str:
        others = [str(self.victim)] * (self.ranks == 3) + [self.backend] * (self.backend != "gloo")
        return ", ".join((self.framework, self.method, self.place, self.how, *others))

    @property
    def timeout_s(self) -> int:
        return SHORT_TIMEOUT_S if self.how in ("frozen", "hangs", "ends its epoch") else TIMEOUT_S

    @property
    def others(self) -> set[int]:
        return set(range(self.ranks)) - {self.victim}

    @property
    def stays(self) -> bool:
        """Whether the process of the rank lives until all others have ended."""
        return self.how == "hangs" or (self.ranks == 3 and self.how in ("raises", "exits"))

    @property
    def detaches(self) -> bool:
        """Whether all ranks detach the method, which leaves no thread, after an error."""
        return self.ranks == 3 and self.framework == "plain" and self.place != "attach"

    @property
    def is_caught(self) -> bool:
        """Whether the error names the rank where it is caught: not that of a collective which the loop calls itself."""
        return not (self.place == "raw barrier" and self.framework in ("plain", "accelerate"))

    @property
    def says(self) -> str:
        """What the last line of the others' errors has."""
        if self.victim == 0 and self.how in ("killed", "frozen"):
            return r"Rank 0 .*is at fault: the store of the job at 127\.0\.0\.1:\d+, which it runs, does not answer"
        says, where = re.escape(SAYS[self.how]), r"\(host \S+, pid \d+\) "
        if self.place == "attach" and self.framework == "plain":  # where nobody watches yet
            says, where = "it never attached a method", ""
        if self.how == "ends its epoch":  # which the others may also learn by what it does next
            says = f"({says}|is about to consolidate the weights, for the end of an epoch)"
            return rf"Rank {self.victim} .*{says}"
        return rf"Rank {self.victim} {where}is at fault: .*{says}.*\(timeout_s={self.timeout_s}"


PLAIN = [name for framework, name in PAIRS if framework == "plain"]
#: Each kind of fault once in each framework, in turns at all places and with all methods; each method killed once.
QUICK = [
    Fault("plain", "dear", "raw barrier", "frozen"),
    *(Fault("plain", name, "forward", "killed", ends=name == "dear") for name in PLAIN),
    Fault("lightning", "selsync", "validation", "frozen"),
    Fault("plain", "selsync", "end", "raises", ends=True),
    Fault("plain", "selsync", "forward", "Ctrl-C", ends=True),
    Fault("fabric", "pipe_sgd", "barrier", "frozen"),
    Fault("lightning", "dear", "forward", "killed", ends=True),
    Fault("lightning", "local_sgd", "saving", "raises"),
    Fault("accelerate", "dear", "raw barrier", "frozen"),
    Fault("lightning", "pipe_sgd", "forward", "Ctrl-C", ends=True),
    Fault("fabric", "local_sgd", "saving", "killed"),
    Fault("fabric", "selsync", "attach", "raises"),
    Fault("fabric", "dear", "forward", "Ctrl-C", ends=True),
    Fault("accelerate", "parameter_server", "gather", "killed"),
    Fault("accelerate", "pipe_sgd", "attach", "raises"),
    Fault("accelerate", "selsync", "forward", "Ctrl-C", ends=True),
]
KILLED = {(fault.framework, fault.method) for fault in QUICK if fault.how == "killed"}
ASYNC = {"policy": "async"}
#: The rest: all methods on all frameworks, three ranks that wait for one another, and what only some have.
NIGHTLY = [
    *(Fault("plain", name, "forward", "hangs") for name in ("dear", "ea_pipe", "local_sgd", "parameter_server")),
    *(Fault(*pair, "forward", "killed") for pair in PAIRS if pair not in KILLED),
    Fault("lightning", "selsync", "forward", "hangs"),
    Fault("lightning", "selsync", "barrier", "hangs", 2, 3),
    *(Fault("plain", name, "batch", "killed", 1, 3) for name in ("dear", "ea_pipe", "pipe_sgd", "selsync")),
    Fault("plain", "selsync", "batch", "killed", 0, 3),
    Fault("plain", "selsync", "batch", "frozen", 0, 3),
    Fault("plain", "ea_pipe", "batch", "frozen", 1, 3),
    *(Fault("plain", name, "batch", "raises", victim, 3) for victim, name in enumerate(("dear", "ea_pipe", "selsync"))),
    *(Fault("plain", name, "batch", "raises", victim, 3) for victim, name in enumerate(("pipe_sgd", "local_sgd"))),
    Fault("plain", "ea_pipe", "batch", "raises", 2, 3),
    Fault("plain", "parameter_server", "batch", "raises", 0, 3),
    *(Fault("plain", "parameter_server", "batch", how, 2, 3, ASYNC) for how in ("raises", "exits")),
    Fault("plain", "parameter_server", "batch", "interrupted", settings=ASYNC, ends=True),
    *(Fault("plain", "dear", "attach", "killed", victim, 3) for victim in (0, 2)),
    *(Fault("plain", "dear", "attach", "hangs", 1, 3, backend=backend) for backend in ("gloo", "cpu:gloo")),
    Fault("plain", "dear", "attach", "frozen", 0, 3, backend="cpu:gloo"),
    Fault("plain", "selsync", "forward", "raises", ranks=4),
    *(Fault("plain", "selsync", "backward", how, ranks=4) for how in ("killed", "frozen")),
    *(Fault("lightning", "ea_pipe", "forward", how, ends=how == "Ctrl-C") for how in ("raises", "Ctrl-C")),
    *(Fault("accelerate", "ea_pipe", "forward", how, ends=how == "Ctrl-C") for how in ("raises", "Ctrl-C")),
    *(Fault("plain", name, "forward", "Ctrl-C", ends=True) for name in ("ea_pipe", "local_sgd", "parameter_server")),
    *(Fault("lightning", name, "attach", "raises", 0) for name in ("dear", "ea_pipe")),
    *(Fault("lightning", name, "forward", "SIGTERM") for name in ("dear", "ea_pipe", "parameter_server", "selsync")),
    *(Fault("lightning", name, "batch", "ends its epoch") for name in ("ea_pipe", "local_sgd")),
    Fault("lightning", "dear", "raw barrier", "killed", 2, 3),
    Fault("lightning", "selsync", "barrier", "killed", 2, 3),
    Fault("accelerate", "dear", "raw barrier", "raises"),
    Fault("transformers", "selsync", "batch", "killed"),
    Fault("transformers", "selsync", "validation", "raises"),
]


@dataclass
class Lost:
    """What became of the ranks, by job and rank.

    Attributes:
        program: what else was printed, by the program that has forked them.
        left: whether a process was left running.
        outputs: what they have printed: also their stacks, if they hung.
        codes: with which they ended; empty if some have not.
        errors: what they raised, type and message, and the threads of the package that were left then.
    """

    program: str
    left: bool
    outputs: dict[str, str]
    codes: dict[str, int]
    errors: dict[str, tuple[str, str, list[str]]]


def lose_ranks(faults: Sequence[Fault]) -> Lost:
    """Runs all jobs."""
    with TemporaryDirectory() as directory, slots(AT_ONCE // 2):
        folder = Path(directory)
        with (folder / "program").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.lose_ranks", directory, *map(str, faults)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=default_signals,
            )
        left = False
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(HUNG_S * len(faults))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                left = True
            process.wait()
        codes = folder / "codes"
        return Lost(
            (folder / "program").read_text(),
            left,
            {file.stem: file.read_text(errors="replace") for file in folder.glob("*.output")},
            json.loads(codes.read_text()) if codes.exists() else {},
            {file.stem: json.loads(file.read_text()) for file in folder.glob("*.error")},
        )


def assert_ended(lost: Lost, fault: Fault) -> None:
    """Asserts that all ranks have ended by themselves, and that all others name the one that was lost.

    They do on the last line of the error that a loop may catch, and of what is printed: long before the timeout, which
    is longer than a rank may take, unless that is how they know.
    """
    assert lost.codes, lost.program
    assert not lost.left
    for rank in range(fault.ranks):
        output, code = lost.outputs[f"{fault} {rank}"], lost.codes[f"{fault} {rank}"]
        if fault.how == "Ctrl-C":
            assert code in (*CODES[fault.how], *([-signal.SIGABRT] if rank == 0 else [])), output
        elif rank == fault.victim:
            assert code in CODES.get(fault.how, (1,)), output
        else:
            assert code == 1, output
    for rank in () if fault.how == "Ctrl-C" else fault.others:
        kind, message, threads = lost.errors[f"{fault} {rank}"]
        output = lost.outputs[f"{fault} {rank}"]
        assert kind == "RuntimeError" or not fault.is_caught, output
        for text in [output.rstrip()] + [message] * fault.is_caught:
            assert re.search(fault.says, text.splitlines()[-1]), f"{fault.says}:\n{text}"
        assert not threads


def by_name(faults: Iterable[Fault]) -> dict[str, Fault]:
    return {str(fault): fault for fault in faults}


assert len(by_name([*QUICK, *NIGHTLY])) == len([*QUICK, *NIGHTLY]), "each has a name of its own"
assert {fault.method for fault in QUICK} == set(METHODS)
