"""The supervisor's side of one run of the processes of a subject, which faults may strike."""

from __future__ import annotations

import heapq
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pipesync.lab.netlab.network import Network
from tests.conformance.training import Checkpoint
from tests.drill import system
from tests.drill.become import fork
from tests.drill.case import Strike
from tests.drill.jobs import STARTS_AGAIN_S, run_lighthouse
from tests.drill.member import Member, run_launcher, run_rank
from tests.drill.phases import UNWATCHED
from tests.drill.subject import Subject, free_port

if TYPE_CHECKING:
    from tests.drill.links import Links

#: Seconds after a subject's limit in which they are late, and do not count as hanging.
LATE_S = 5.0
#: Seconds that a run may take without a fault that ends it, on a busy machine.
RUN_S = 240.0
#: Seconds that ranks which hang have to print their stacks, and those that are left over to end.
STACKS_S, GRACE_S = 1.0, 2.0
#: The port of a store, or a lighthouse, on an emulated host, where every one is free.
PORT = 29500
#: Bytes of a disk that is going to be full.
DISK_BYTES = 2**21
FILLER = "filler"


class Scene:
    """One run: starts the processes, has faults strike them, and sees how they end.

    Attributes:
        members: the processes, by number, and then those that have started again.
        fired_at: when the last fault has struck, by this process's clock.
        released_at: when what a fault has held was let go, after all others had ended.
        reached: the numbers of the faults whose phase has come.
        proofs: of each fault that has happened, by its number.
        hung: those that had to be killed.
        heard: what processes have said of their rounds, in order, and of what they join.
        left_behind: what was there after all had ended, in words.
    """

    def __init__(
        self, subject: Subject, timeout_s: float, strikes: Sequence[Strike] = (), resumed: Checkpoint | None = None
    ) -> None:
        self.subject, self.strikes, self._timeout_s, self._resumed = subject, strikes, timeout_s, resumed
        self.members = [Member(rank) for rank in range(subject.members)]
        self.fired_at: float | None = None
        self.released_at: float | None = None
        self.proofs: dict[int, str] = {}
        self.hung: list[Member] = []
        self.heard: list[tuple[Member, dict[str, Any]]] = []
        self.left_behind: list[str] = []
        self._said: dict[int, str] = {}
        self.reached: set[int] = set()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._stopped: set[Member] = set()  # for good
        self._network: Network | None = None
        self._launcher = self._lighthouse = 0  # their processes

    # --- what happens -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all processes to their end."""
        kinds = [strike.kind for strike in self.strikes]
        for kind in kinds:
            kind.prepare(self)
        self._emulates = any(kind.emulates for kind in kinds)
        self._by_launcher = any(kind.of_launcher for kind in kinds)
        if self._emulates:
            racks = 2 if any(kind.divides_evenly for kind in kinds) else 1
            hosts = self.subject.members + self.subject.has_lighthouse  # which is on the last one
            self._network = Network(hosts + hosts % racks, racks=racks)
            self._network.__enter__()
        self._meeting = ("127.0.0.1", free_port())
        if self._network is not None:
            last = self._network.hosts - 1
            self._meeting = self._network.address(last if self.subject.has_lighthouse else 0), PORT
        if self.subject.has_lighthouse:
            self.start_lighthouse()
        self._start()
        self._supervise()
        self._end()

    def _start(self) -> None:
        roles = [self._role_of(member, self.strikes, self._resumed) for member in self.members]
        if not self._by_launcher:
            for member, role in zip(self.members, roles, strict=True):
                member.begin(fork(role))
            return
        ours, theirs = Pipe()
        self._launcher = fork(partial(run_launcher, roles, self._meeting[1], theirs))
        for member, pid in zip(self.members, ours.recv(), strict=True):
            member.begin(pid)

    def _role_of(self, member: Member, strikes: Sequence[Strike], resumed: Checkpoint | None) -> Callable[[], object]:
        environment = self.subject.environment(member.rank, *self._meeting)
        if self._by_launcher:
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        namespace = None
        if self._network is not None:
            of_host = self._network.environment(member.rank)
            environment |= {name: value for name, value in of_host.items() if name.endswith("IFNAME")}
            namespace = self._network.namespace(member.rank)
        return partial(run_rank, self.subject, member, strikes, environment, namespace, resumed, self._by_launcher)

    def _start_again(self, rank: int) -> None:
        member = Member(rank, again=True)
        self.members.append(member)
        member.begin(fork(self._role_of(member, (), None)))

    def _supervise(self) -> None:
        begin = time.monotonic()
        while live := self._live():
            if all(member in self._stopped for member in live):
                self._release()
            if time.monotonic() > self._deadline(begin):
                self._give_up(live)
                return
            self._look(live)
        if self.released_at is None:
            self._release()

    def _live(self) -> list[Member]:
        return [member for member in self.members if member.ended_at is None]

    def _deadline(self, begin: float) -> float:
        ends = [strike for strike in self.strikes if strike.kind.ends_victim or not strike.kind.spares]
        if self.released_at is not None:
            return self.released_at + self.limit_s + LATE_S
        if self.fired_at is not None and ends and len(self.reached) == len(self.strikes):
            return self.fired_at + self.limit_s + LATE_S
        return begin + RUN_S + self._timeout_s

    @property
    def limit_s(self) -> float:
        """Seconds that survivors have to end, after the faults that have struck."""
        return self.subject.limit_s(all(self.strikes[number].phase not in UNWATCHED for number in self.reached))

    def _look(self, live: Sequence[Member]) -> None:
        """Waits a little for what processes say, and for their ends; calls the timers that are due."""
        due = self._timers[0][0] - time.monotonic() if self._timers else 0.25
        watched: dict[Any, Member] = {
            one: member for member in live for one in (member.connection, member.sentinel, member.reads)
        }
        ready = wait(list(watched), max(0.0, min(0.25, due)))
        for member in dict.fromkeys(watched[one] for one in ready):
            ended = member.sentinel in ready
            member.read_output()
            for event in member.listen():
                self._hear(member, event)
            if ended:
                member.end()
                if not member.again and any(self._starts_again(number, member) for number in self.reached):
                    self.later(STARTS_AGAIN_S, partial(self._start_again, member.rank))
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _starts_again(self, number: int, member: Member) -> bool:
        return self.strikes[number].restarts and self._struck(number) is member

    def _hear(self, member: Member, event: dict[str, object]) -> None:
        if "at" in event:
            number = int(str(event["at"]))
            self.fired_at = time.monotonic()
            self.reached.add(number)
            self.strikes[number].kind.fire(self, number)
        if "did" in event:
            self._said[int(str(event["did"]))] = str(event["what"])
        if "round" in event or "joins" in event:
            self.heard.append((member, event))
        if "result" in event:
            member.result = event["result"]  # type: ignore[assignment]
        if "error" in event:
            member.error = event["error"]  # type: ignore[assignment]

    def _release(self) -> None:
        if self.released_at is None:
            self.released_at = time.monotonic()
            self._stopped.clear()
            for number, strike in enumerate(self.strikes):
                if number in self.reached:
                    strike.kind.release(self, number)

    def _give_up(self, live: Sequence[Member]) -> None:
        """Has ranks that hang print their stacks, and kills them."""
        self.hung = [member for member in live if member not in self._stopped]
        for member in self.hung:
            self._send(member, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            for member in live:
                member.read_output()
            time.sleep(STACKS_S / 10)
        for member in live:
            self._send(member, signal.SIGKILL)
            member.end()

    def _end(self) -> None:
        """Sees what is left behind, reaps all processes, and removes what this run has needed."""
        for pid in (self._launcher, self._lighthouse):
            self._kill(pid)
        deadline = time.monotonic() + GRACE_S
        while (left := system.children()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self.hung:
            self.left_behind += [f"process {pid}" for pid in left]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for member in self.members:
            _, status = os.waitpid(member.pid, 0)
            member.code = os.waitstatus_to_exitcode(status)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass
        pids = [str(member.pid) for member in self.members]
        shared = Path("/dev/shm").iterdir() if Path("/dev/shm").is_dir() else ()
        self.left_behind += [str(path) for path in shared if any(pid in path.name for pid in pids)]
        for number, strike in enumerate(self.strikes):
            strike.kind.finish(self, number)
        if self._network is not None:
            self._network.__exit__(None, None, None)
        for member in self.members:
            member.close()

    # --- what faults ask for ----------------------------------------------------------------------------------------

    def prove(self, number: int, proof: str) -> None:
        """Notes that a fault has happened, and how that is known; an empty text proves nothing."""
        if proof:
            self.proofs[number] = proof

    def said(self, number: int) -> str:
        """Returns what the rank that a fault strikes has said of it."""
        return self._said.get(number, "")

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))

    def go(self, number: int) -> None:
        """Lets the rank that waits at its gate go on."""
        with suppress(OSError):
            self._struck(number).connection.send("go")

    def send(self, number: int, which: signal.Signals) -> None:
        """Sends a signal to the rank that a fault strikes, if it is still there."""
        self._send(self._struck(number), which)

    def stop(self, number: int, proof: str = "") -> None:
        """Sends SIGSTOP, and waits until the process is stopped."""
        member, kind = self._struck(number), self.strikes[number].kind
        self._send(member, signal.SIGSTOP)
        deadline = time.monotonic() + GRACE_S
        while (state := system.state_of(member.pid)) not in "TX" and time.monotonic() < deadline:
            time.sleep(0.001)
        if state == "T":
            self.prove(number, proof or f"state T of process {member.pid}")
            if not kind.spares:
                self._stopped.add(member)

    def runs(self, number: int) -> bool:
        """Returns whether the rank that a fault strikes has not ended."""
        return self._struck(number).ended_at is None and system.state_of(self._struck(number).pid) not in "ZX"

    def exit_code_of_struck(self, number: int) -> int | None:
        return self._struck(number).code

    def error_of_struck(self, number: int) -> str:
        error = self._struck(number).error
        return "" if error is None else f"{error[0]}: {error[1]}"

    def kill_launcher(self, number: int) -> None:
        self.prove(number, f"exit status {self._kill(self._launcher)} of the launcher")
        self._launcher = 0

    def kill_lighthouse(self, number: int) -> None:
        self.prove(number, f"exit status {self._kill(self._lighthouse)} of the lighthouse")
        self._lighthouse = 0

    def start_lighthouse(self) -> None:
        host = None if self._network is None else self._network.namespace(self._network.hosts - 1)
        self._lighthouse = fork(partial(run_lighthouse, self._meeting[1], host))

    def cut_link(self, number: int) -> None:
        links, host = self._links, self.strikes[number].rank
        links.cut(host)
        if not links.is_connected(host):
            self.prove(number, f"host {host} has no carrier")

    def mend_link(self, number: int) -> None:
        links, host = self._links, self.strikes[number].rank
        links.mend(host)
        if not links.is_connected(host):
            self.proofs.pop(number, None)

    def part_network(self, number: int) -> None:
        self._links.part()
        if self._links.is_parted():
            self.prove(number, "the link between both halves has no carrier")

    def lose_packets(self, number: int, seconds: float) -> None:
        links, host = self._links, self.strikes[number].rank
        links.lose_packets(host)
        self.later(seconds, lambda: links.lose_no_packets(host))

    def packets_lost(self, number: int) -> int:
        return self._links.packets_lost(self.strikes[number].rank)

    def mount_small_disk(self) -> None:
        system.mount_memory(self._disk, DISK_BYTES)

    def fill_disk(self) -> int:
        """Fills the disk of the checkpoints; returns how many bytes are free."""
        with suppress(OSError), (self._disk / FILLER).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        status = os.statvfs(self._disk)
        return status.f_bavail * status.f_frsize

    def empty_disk(self) -> None:
        (self._disk / FILLER).unlink()

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _links(self) -> Links:
        from tests.drill.links import Links  # needs pyroute2

        assert self._network is not None
        return Links(self._network)

    @property
    def _disk(self) -> Path:
        """Where checkpoints of the rank are written that the first fault strikes."""
        return self.subject.folder_of(self.strikes[0].rank)

    def _struck(self, number: int) -> Member:
        return self.members[self.strikes[number].rank]

    def _send(self, member: Member, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if member.ended_at is None:
                os.kill(member.pid, which)

    def _kill(self, pid: int) -> int | None:
        if not pid:
            return None
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
