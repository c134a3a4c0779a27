"""The kinds of faults: how each is done, and how it is proved that it has happened.

[Note: both sides of a fault]
A rank that reaches the phase of a fault calls :meth:`Fault.strike`, in its own process. What another process has to do,
such as stopping it, the supervisor does in :meth:`Fault.fire` while the rank waits. Neither knows what is trained, nor
what a fault should lead to, beyond the attributes of its class.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.drill import system
from tests.drill.phases import PHASES, WITHIN_STEPS, Gate

if TYPE_CHECKING:
    from tests.drill.scene import Scene

#: What faults strike: the ranks of one job, or replicas that are jobs of their own.
RANKS, JOBS = SUBJECTS = ("ranks", "jobs")

#: For how long what passes lasts: less than the timeout.
PASSES_S = 2.5
#: The share of the time in which a slow host runs, and a cycle of running and stopping.
SLOW_SHARE, SLOW_CYCLE_S, SLOW_S = 0.1, 0.05, 4.0
#: What a rank may use more than it has before its memory ends.
MEMORY_LEFT, MEMORY_ASKED = 2**25, 2**28
#: Bytes of a checkpoint that are damaged.
DAMAGED_BYTES = 512
#: Bytes of a file after which a write to it kills its process: less than a checkpoint has.
TORN_BYTES = 1000


class Fault:
    """A kind of fault.

    Attributes:
        name: in options, tables and records.
        phases: in which it can strike.
        spares: whether the rank is not lost: what is asked of the others is asked of it, too.
        must_survive: whether a training that ends because of it has failed.
        emulates: whether each rank needs an emulated host, and so root.
        divides_evenly: whether the ranks must be an even number.
        by_writer: whether it strikes a rank that writes a checkpoint.
        combines: whether another fault may strike in the same training.
        ends_victim: whether the rank that it strikes must end by itself, as the others do.
        own_error: pattern of the errors that the fault itself causes on a rank, so that it need name no other.
        of_launcher: whether it needs a launcher, which then runs the store of the job.
        subjects: what it can strike.
        ends_job: whether a job that it strikes ends at once, so that it may start again.
    """

    name: str
    phases: tuple[str, ...] = PHASES
    spares = must_survive = emulates = divides_evenly = by_writer = ends_victim = of_launcher = ends_job = False
    combines = True
    subjects: tuple[str, ...] = SUBJECTS
    own_error = "(?!)"

    def prepare(self, scene: Scene) -> None:
        """Called by the supervisor before ranks start."""

    def strike(self, gate: Gate, number: int) -> None:
        """Called on the rank when its phase has come; the default lets the supervisor do it."""
        gate.wait()

    def fire(self, scene: Scene, number: int) -> None:
        """Called by the supervisor when the rank is there; lets the rank go on, if it is to."""

    def finish(self, scene: Scene, number: int) -> None:
        """Called by the supervisor when all ranks have ended: proves what can be proved only then."""

    def release(self, scene: Scene, number: int) -> None:
        """Called by the supervisor when all other ranks have ended."""

    def repair(self, scene: Scene) -> None:
        """Called by the supervisor before the training is resumed: what a user would have mended."""

    def culprits(self, struck: int, rank: int, ranks: int) -> Collection[int]:
        """Returns the ranks that ``rank`` may name if this fault strikes the rank ``struck``."""
        return {struck}


class Signal(Fault):
    """A signal that ends a process."""

    ends_job = True

    def __init__(self, name: str, number: signal.Signals) -> None:
        self.name, self.number = name, number

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.send(number, self.number)
        if self.number != signal.SIGKILL:
            scene.go(number)  # a handler may wait for Python code to run

    @override
    def finish(self, scene: Scene, number: int) -> None:
        code = scene.exit_code_of_struck(number)
        if code == -self.number or (self.number == signal.SIGTERM and code == 128 + self.number):
            scene.prove(number, f"exit status {code}")
        elif self.number == signal.SIGTERM and code == 0 and self._comes_late(scene, number):
            scene.prove(number, "exit status 0: the training was over")
        elif self.number == signal.SIGTERM and "SIGTERM" in scene.error_of_struck(number):
            scene.prove(number, f"{scene.error_of_struck(number)}, exit status {code}")

    def _comes_late(self, scene: Scene, number: int) -> bool:
        """Returns whether the training may have ended first: a replica that is a job trains on to a round."""
        return scene.strikes[number].phase == "end" or scene.subject.has_lighthouse


class MemoryLimit(Fault):
    """A process whose memory ends, by a limit, in Python code."""

    name, ends_job = "memory", True

    @override
    def strike(self, gate: Gate, number: int) -> None:
        used = system.memory_of_this_process()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LEFT, resource.RLIM_INFINITY))
        try:
            bytearray(MEMORY_ASKED)
        except MemoryError as error:
            gate.say(did=number, what=f"MemoryError with {MEMORY_LEFT >> 20} MiB left")
            raise MemoryError("no memory is left for this rank") from error

    @override
    def finish(self, scene: Scene, number: int) -> None:
        scene.prove(number, scene.said(number))


class Freeze(Fault):
    """SIGSTOP for good; when the others have ended, the rank wakes up, and must end, too."""

    name, ends_victim = "freeze", True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.stop(number)
        scene.go(number)

    @override
    def release(self, scene: Scene, number: int) -> None:
        scene.send(number, signal.SIGCONT)


class Pause(Fault):
    """SIGSTOP, and SIGCONT before others need count the rank as lost."""

    name, spares, must_survive = "pause", True, True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.stop(number)
        scene.go(number)
        scene.later(PASSES_S, lambda: scene.send(number, signal.SIGCONT))


class Slow(Fault):
    """A host with a tenth of its processor, for some seconds."""

    name, spares, must_survive = "slow", True, True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.go(number)
        cycles = int(SLOW_S / SLOW_CYCLE_S)

        def stop(left: int) -> None:
            if left and scene.runs(number):
                scene.stop(number, f"stopped for {1 - SLOW_SHARE:.0%} of {cycles - left + 1} cycles")
                scene.later((1 - SLOW_SHARE) * SLOW_CYCLE_S, lambda: wake(left - 1))

        def wake(left: int) -> None:
            scene.send(number, signal.SIGCONT)
            scene.later(SLOW_SHARE * SLOW_CYCLE_S, lambda: stop(left))

        stop(cycles)


class RaisedError(Fault):
    """An exception on one rank."""

    name, ends_job = "error", True

    @override
    def strike(self, gate: Gate, number: int) -> None:
        gate.say(did=number, what="raised")
        raise KeyError("a bug, for the drill")

    @override
    def finish(self, scene: Scene, number: int) -> None:
        if scene.said(number) and "a bug, for the drill" in scene.error_of_struck(number):
            scene.prove(number, scene.error_of_struck(number))


class NotANumber(Fault):
    """A loss that is NaN on one rank: as with DDP, the weights of all ranks become NaN, or those of none."""

    name, phases, spares = "nan", ("forward",), True

    @override
    def strike(self, gate: Gate, number: int) -> None:
        gate.poisoned = True
        gate.say(did=number, what="the loss times NaN")

    @override
    def finish(self, scene: Scene, number: int) -> None:
        scene.prove(number, scene.said(number))


class FullDisk(Fault):
    """The file system of the checkpoints has no space left, on all ranks that write some."""

    name, phases, by_writer, combines = "full disk", ("checkpoint",), True, False
    own_error = "(?i)no space left|os error 28|write(r)? failed|file write|unexpected pos"

    @override
    def prepare(self, scene: Scene) -> None:
        scene.mount_small_disk()

    @override
    def fire(self, scene: Scene, number: int) -> None:
        if free := scene.fill_disk():
            raise RuntimeError(f"the disk is not full: {free} bytes are free")
        scene.prove(number, "0 bytes are free")
        scene.go(number)

    @override
    def repair(self, scene: Scene) -> None:
        scene.empty_disk()


class TornWrite(Fault):
    """A process that dies within the write of a checkpoint, of which a part is in the file."""

    name, phases, by_writer, combines, ends_job = "torn write", ("checkpoint",), True, False, True

    @override
    def strike(self, gate: Gate, number: int) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (TORN_BYTES, TORN_BYTES))

    @override
    def finish(self, scene: Scene, number: int) -> None:
        if scene.exit_code_of_struck(number) == -signal.SIGXFSZ:
            scene.prove(number, f"SIGXFSZ at byte {TORN_BYTES} of a file")


class CorruptCheckpoint(Fault):
    """A checkpoint of which a block is damaged when the training is resumed from it."""

    name, phases, by_writer, combines, subjects = "corrupt checkpoint", ("resume",), True, False, (RANKS,)


class LauncherKilled(Fault):
    """SIGKILL for the process that has started the ranks, and runs the store of the job."""

    name, spares, of_launcher, combines, subjects = "launcher killed", True, True, False, (RANKS,)

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.kill_launcher(number)
        scene.go(number)


class LighthouseKilled(Fault):
    """SIGKILL for the lighthouse of jobs, which starts again at the same address."""

    name, spares, must_survive, subjects = "lighthouse killed", True, True, (JOBS,)

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.kill_lighthouse(number)
        scene.go(number)
        scene.later(PASSES_S, scene.start_lighthouse)


class LinkCut(Fault):
    """The link of a host is cut for good; the rank on it must end, too."""

    name, emulates, combines, ends_victim = "link cut", True, False, True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.cut_link(number)
        scene.go(number)


class LinkMended(Fault):
    """The link of a host is cut, and mended before others need count the rank as lost."""

    name, emulates, combines, spares, must_survive = "link mended", True, False, True, True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.cut_link(number)
        scene.go(number)
        scene.later(PASSES_S, lambda: scene.mend_link(number))


class PacketsLost(Fault):
    """A host's link drops packets, for some seconds; in a phase after which there are some."""

    phases = ("attach", *WITHIN_STEPS)
    name, emulates, combines, spares, must_survive = "packets lost", True, False, True, True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.lose_packets(number, SLOW_S)
        scene.go(number)

    @override
    def finish(self, scene: Scene, number: int) -> None:
        if lost := scene.packets_lost(number):
            scene.prove(number, f"{lost} packets were dropped")


class Partition(Fault):
    """The network falls into two halves, for good."""

    name, spares, emulates, combines, divides_evenly, ends_victim = "partition", True, True, False, True, True

    @override
    def fire(self, scene: Scene, number: int) -> None:
        scene.part_network(number)
        scene.go(number)

    @override
    def culprits(self, struck: int, rank: int, ranks: int) -> Collection[int]:
        first, second = range(ranks // 2), range(ranks // 2, ranks)
        return second if rank in first else first


#: All kinds, by name.
FAULTS: dict[str, Any] = {
    fault.name: fault
    for fault in (
        Signal("kill", signal.SIGKILL),
        Signal("terminate", signal.SIGTERM),
        MemoryLimit(),
        Freeze(),
        Pause(),
        Slow(),
        RaisedError(),
        NotANumber(),
        FullDisk(),
        TornWrite(),
        CorruptCheckpoint(),
        LauncherKilled(),
        LighthouseKilled(),
        LinkCut(),
        LinkMended(),
        PacketsLost(),
        Partition(),
    )
}
