"""A world in which the rounds of replicas run in one process, in a random order that a seed repeats, with faults.

Processes are threads of which one runs at a time. The protocol is the real one; what is simulated are the lighthouse,
the messages, and a method whose state is the list of the members of each round.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lightning_pipesync.core.faults.lighthouse import Member, Quorum, Standing
from lightning_pipesync.methods.replicas import membership, rounds
from lightning_pipesync.methods.replicas.rounds import QuorumRounds

#: What may befall a process.
EVENTS = ("dies", "freezes", "comes", "dies and comes", "leaves")


class Killed(BaseException):
    """Ends the thread of a process that dies."""


@dataclass
class Ring:
    """The messages among the members of a line: of each operation, from whom to whom."""

    members: tuple[str, ...]
    came: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    sent: dict[tuple[int, str, str], Any] = field(default_factory=dict)


class Process:
    """A process of a replica: it takes the place of those of the same name that were before."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name, self.id = world, name, f"{name}/{number}"
        self.outcome = ""  # how it has ended
        self.killed = self.frozen = self.told = self.left = self.joined = False
        self.late = False  # with its signs of life: the lighthouse counts it as lost, and it is not
        self.ready: Callable[[], object] = lambda: True  # whether what it waits for has happened
        self.turn = threading.Semaphore(0)
        self.method = Method(self)
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def lives(self) -> bool:
        return not self.outcome and not self.killed

    def wait(self, ready: Callable[[], object] = lambda: True) -> None:
        """Lets others run, until `ready` returns something true."""
        self.ready = ready
        self.world.turn.release()
        self.turn.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        self.turn.acquire()
        outcome = "killed"
        try:
            if not self.killed:
                outcome = self._train()
        except Killed:
            pass
        except RuntimeError as error:
            outcome = "left out" if "have continued without it" in str(error) else f"raised {error!r}"
        except BaseException as error:
            outcome = f"raised {error!r}"
        self.outcome = outcome
        self.world.turn.release()

    def _train(self) -> str:
        each = QuorumRounds(self.method, "lighthouse:1", self.world.num_replicas, 60)  # type: ignore[arg-type]
        try:
            each.join()
        except RuntimeError as error:
            if "Training begins with" in str(error):
                return "too few"
            raise
        self.joined = True
        self.world.note(self)
        while len(self.method.rounds) < self.world.num_rounds:
            each.go_on()
            self.method.data.offset += self.method.data.size  # a step
            before = len(self.method.rounds)
            asks = not self.world.unasked or len(self.method.rounds) % self.world.unasked == 0
            if self.told and asks and self.world.random.random() < 0.2:
                each.leave_now()
            else:
                leaves_by = 1.0 if self.told and asks else None
                each.run(self.method.round_, self.method.snapshot(), asks=asks, leaves_by=leaves_by)
            if not each.has_left or len(self.method.rounds) > before:
                self.world.note(self)
            if each.has_left:
                return "left"
        each.end(self.method.round_)
        each.close(ends_waits=False)
        self.left = True
        each.close()
        return "done"


class Data:
    """The place in the data: those who divide them are done with one sample each after a step."""

    def __init__(self, method: Method) -> None:
        self._method, self.offset, self.size = method, 0, 0

    def redivide(self, among: tuple[int, int] | None = None) -> None:
        line = self._method._line
        self.size = (among or (line.rank, line.size))[1]

    def common(self) -> list[Any]:
        return []

    def skip_ended_epochs(self) -> None:
        """Does nothing: the data never end."""


class Method:
    """What :class:`QuorumRounds` needs of a method; the state is the members of each round."""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.rounds: tuple[tuple[str, ...], ...] = ()
        self.transport = SimpleNamespace(
            new_objects=lambda: SimpleNamespace(
                rank=0, gather_objects=lambda each: [each], broadcast_object=lambda each: each
            ),
            end_waits_for_shards=lambda: None,
            exchange_with=lambda line: None,
            exchange_flags=lambda flag: self._line.start(("flag", flag)),
        )
        self.data = Data(self)
        self._line: Line
        self._waiting: list[int] = []

    @property
    def num_steps(self) -> int:
        return len(self.rounds)

    @property
    def steps_of_optimizers(self) -> list[int]:
        return [len(self.rounds)]

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    def round_(self) -> None:
        everyone = self._line.start(("data", self.rounds)).wait()
        assert all(each == ("data", self.rounds) for each in everyone), everyone
        self.rounds = (*self.rounds, self._line.ring.members)

    def snapshot(self) -> Any:
        return self.rounds

    def completed(self, snapshot: Any) -> Any:
        return snapshot

    def gathered_snapshot(self, keeper: int) -> Any:
        self._line.start(("outer state",)).wait()
        return self.rounds

    def regroup(self, line: Line, snapshot: Any, first: int, new: Sequence[int]) -> None:
        self._line, self._waiting = line, []
        if line.rank in new:
            snapshot, self.data.offset = line.receive(first)
        elif line.rank == first:
            for rank in new:
                line.send(rank, (snapshot, self.data.offset))
            self._waiting = list(new)
        line.start(("outer state",)).wait()
        self.rounds = snapshot

    def undo_averages(self) -> None:
        pass

    def launch(self, waits: bool = False) -> None:
        pass

    def send_rest(self) -> None:
        while self._waiting:
            self._line.send(self._waiting.pop(), "rest")

    def receive_rest(self, first: int) -> None:
        assert self._line.receive(first) == "rest"


class Line:
    """In place of :class:`lightning_pipesync.core.comm.line.Line`: a store's address is the id of its process."""

    def __init__(self, stores: Sequence[str], rank: int, key: str, timeout: timedelta) -> None:
        self.process = here()
        self.world, self.rank, self.size, self.key = self.process.world, rank, len(stores), key
        self.ring = self.world.rings.setdefault(key, Ring(tuple(stores)))
        assert self.ring.members == tuple(stores), "they disagree on who takes part"
        self.number = self.messages = 0
        self.ring.came.add(self.process.id)
        others = [each for each in stores if each not in self.ring.came]
        self.process.wait(lambda: self._missing(others) or key in self.world.given_up or self._came())
        if not self._came() or key in self.world.given_up:
            self.close()  # those who have come meanwhile notice it after a timeout
            raise dist.DistStoreError("not all have come")

    def close(self) -> None:
        self.ring.closed.add(self.process.id)

    def start(self, message: Any) -> SimpleNamespace:
        self.number += 1
        number, me = self.number, self.process.id
        peers = [each for each in self.ring.members if each != me]
        for peer in self.world.random.sample(peers, len(peers)):
            self.process.wait()  # it may die in between
            self.ring.sent[number, me, peer] = message
        return SimpleNamespace(wait=lambda: [message, *(self._arrived(number, peer) for peer in peers)])

    def send(self, rank: int, message: Any) -> None:
        self.process.wait()
        self.messages += 1
        self.ring.sent[-self.messages, self.process.id, self.ring.members[rank]] = message

    def receive(self, rank: int) -> Any:
        sender, me = self.ring.members[rank], self.process.id
        keys = lambda: [key for key in self.ring.sent if key[0] < 0 and key[1:] == (sender, me)]  # noqa: E731
        self.process.wait(lambda: keys() or self._missing([sender]))
        if not keys():
            raise dist.DistNetworkError(f"{sender} is lost")
        return self.ring.sent.pop(max(keys()))

    def _arrived(self, number: int, peer: str) -> Any:
        key = (number, peer, self.process.id)
        self.process.wait(lambda: key in self.ring.sent or self._missing([peer]))
        others = [each for each in self.ring.members if each != self.process.id]
        if key not in self.ring.sent or (self._missing(others) and self.world.random.random() < 0.3):
            raise dist.DistNetworkError(f"{peer} is lost")
        return self.ring.sent[key]

    def _came(self) -> bool:
        return self.ring.came == set(self.ring.members)

    def _missing(self, members: Sequence[str]) -> bool:
        """Returns whether one of these members no longer answers here."""
        gone = {each.id for each in self.world.processes if not each.lives or each.frozen}
        return any(each in gone or each in self.ring.closed for each in members)


class Lighthouse:
    """In place of :class:`lightning_pipesync.core.faults.lighthouse.Lighthouse`."""

    def __init__(self, *_: Any) -> None:
        self.process = here()
        self.id, self.was_silent = self.process.id, False

    def ask(self, standing: Standing, deadline: float) -> Quorum | None:
        world, me = self.process.world, self.process.id
        self._tell(standing)
        if math.isfinite(deadline) and world.random.random() < 0.3:
            self.process.wait()
            return world.answers.pop(me, None)
        self.process.wait(lambda: me in world.answers or world.quorum())
        if me not in world.answers:
            world.answer()
        return world.answers.pop(me)

    def leave(self, standing: Standing) -> None:
        self._tell(standing)
        self.process.left = True

    def _tell(self, standing: Standing) -> None:
        world, me = self.process.world, self.process.id
        world.answers.pop(me, None)
        world.asking[me] = Member(me, "host", 1, [me], standing)

    def go_on(self) -> None:
        pass

    def close(self) -> None:
        self.process.left = True


def here() -> Process:
    return threading.current_thread().process  # type: ignore[attr-defined, no-any-return]


class World:
    """Runs processes in a random order, and has them die, freeze, wake up, come and leave.

    One process neither dies nor freezes, and so what is complete is never lost.
    """

    def __init__(
        self,
        seed: int,
        num_replicas: int,
        num_rounds: int,
        faults: int = 0,
        unasked: int = 0,
        late: bool = False,
        at: tuple[int, str] | None = None,
    ) -> None:
        self.random, self.num_rounds, self.faults = random.Random(seed), num_rounds, faults
        self.turns, self.at = 0, at  # turns so far; the one at which something befalls a process, and what
        self.late = late  # whether signs of life may be late
        self.unasked = unasked  # who takes part is asked in each round, or in one of so many
        self.num_replicas = num_replicas
        self.turn = threading.Semaphore(0)
        self.processes: list[Process] = []
        self.rings: dict[str, Ring] = {}
        self.given_up: set[str] = set()
        self.asking: dict[str, Member] = {}
        self.answers: dict[str, Quorum] = {}
        self.last: list[str] = []  # ids of the last quorum
        self.num_quorums, self.clock = 0, 0.0
        self.outsiders: set[str] | None = None  # those without whom training has ended, once it has
        self.found: dict[int, tuple[tuple[str, ...], ...]] = {}  # the rounds after each number of them
        self.places: dict[int, int] = {}  # the place in the data then
        for rank in range(num_replicas):
            self.come(str(rank))
        self.survivor = self.random.choice(self.processes)

    def come(self, name: str) -> None:
        process = Process(self, name, len(self.processes))
        process.thread.process = process  # type: ignore[attr-defined]
        if self.outsiders is not None:
            self.outsiders.add(process.id)
        self.processes.append(process)
        process.thread.start()

    def note(self, process: Process) -> None:
        """Checks that a replica has the rounds of all others, unless they have ended without it."""
        rounds = process.method.rounds
        if self.outsiders and process.id in self.outsiders:
            return
        if process is self.survivor and len(rounds) == self.num_rounds:
            self.outsiders = {each.id for each in self.processes if each.id not in rounds[-1] or each.frozen}
        assert self.found.setdefault(len(rounds), rounds) == rounds, "replicas have different weights"
        place = process.method.data.offset
        assert self.places.setdefault(len(rounds), place) == place, "replicas are at different places in the data"

    def quorum(self) -> list[str]:
        """Returns who is in the next quorum, if there is one now: when all who live, and were in the last, have asked.

        Those who have died, or are frozen, may be in it, too: their silence is too short.
        """
        awaited = [each for each in self.processes if each.lives and not each.frozen and not each.left]
        awaited = [each for each in awaited if not each.late]
        if self.last:
            awaited = [each for each in awaited if each.id in self.last or each is self.survivor]
        return [] if any(each.id not in self.asking for each in awaited) else list(self.asking)

    def answer(self) -> None:
        healthy = {each.id for each in self.processes if each.lives and not each.frozen}
        members = [self.asking[me] for me in self.quorum() if me in healthy or self.random.random() < 0.5]
        self.num_quorums += 1
        number = 1 + max(int(each.standing.generation.partition("/")[0] or 0) for each in members)
        quorum = Quorum(sorted(members, key=lambda each: each.id), f"{number:08d}/{self.num_quorums:06d}")
        self.last = [each.id for each in members]
        self.answers |= dict.fromkeys(self.last, quorum)
        live = {each.id for each in self.processes if each.lives}
        self.asking = {me: each for me, each in self.asking.items() if me not in self.last and me in live}

    def run(self) -> None:
        with (
            patch.object(membership, "Line", Line),
            patch.object(rounds, "Lighthouse", Lighthouse),
            patch.object(rounds, "open_store", lambda: SimpleNamespace(port=0)),
            patch.object(rounds, "is_open", lambda ids: any(each.lives for each in self.processes if each.id in ids)),
            patch.object(rounds, "own_address", lambda *_: ""),
            patch.object(membership, "give_up", lambda _, key: self.given_up.add(key)),
            patch.object(rounds, "time", SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.clock)),
            patch.object(membership.log, "warning"),
        ):
            try:
                while self._step():
                    pass
            finally:
                for process in self.processes:
                    process.killed = True
                    process.turn.release()

    def _sleep(self, seconds: float) -> None:
        """Lets time pass, which plays a part for those only who wait for others."""
        self.clock += seconds if self.late else 5
        here().wait()

    def _step(self) -> bool:
        """Has a random process go on, or something befall one; returns whether some are left."""
        self.turns += 1
        if self.at is not None and self.turns == self.at[0]:
            self._befall(self.at[1])
        if self.faults and not self.survivor.left and self.random.random() < 0.015:
            self.faults -= 1
            self._befall(self.random.choice(EVENTS))
        live = [each for each in self.processes if not each.outcome]
        if not live:
            return False
        for each in live:
            if each.frozen and self.random.random() < 0.01:
                each.frozen = False
            if each.late and self.random.random() < 0.02:
                each.late = False
        able = [each for each in live if each.killed or (not each.frozen and each.ready())]
        if not able:
            frozen = [each for each in live if each.frozen]
            assert frozen, "all wait for ever: " + ", ".join(each.id for each in live)
            self.random.choice(frozen).frozen = False
            return True
        self.random.choice(able).turn.release()
        self.turn.acquire()
        return True

    def _befall(self, what: str) -> None:
        if self.late and self.random.random() < 0.5:
            self.random.choice([each for each in self.processes if each.lives]).late = True
            return
        others = [each for each in self.processes if each.lives and each is not self.survivor and not each.frozen]
        if others and what == "leaves":
            self.random.choice(others).told = True
        elif others and what != "comes":
            victim = self.random.choice(others)
            victim.killed, victim.frozen = what != "freezes", what == "freezes"
        if what == "comes":
            self.come(str(self.random.randrange(6)))
        elif others and what == "dies and comes":
            self.come(victim.name)
