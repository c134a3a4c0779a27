"""Rounds with a quorum: what replicas that come and go do together, all of a quorum or none.

[Note: what is undone]
Replicas communicate in rounds: the end of a step in which an average starts or is applied. Before one in which some
starts a replica asks the lighthouse who takes part (:class:`Lighthouse`), also in the next rounds until another one
starts. One that has all data of a round sends one byte to all others, and goes on when it has theirs. If that fails,
those that are left ask, agree on what is complete (:func:`agree`), undo a round that one of them misses, and repeat it
from each replica's weights before it: the outcome is a round of those that are left.

[Note: who comes]
A replica that is new joins before its first step: it asks, too, and so is in the quorum of the others' next round. When
that is complete, the others make another group, with it, and the first of them hands over what it knows.

[Note: who leaves]
A replica that was asked to leave says so in its question, and takes part in the round. Within it all gather the outer
state, so that nothing of it is lost. When it is complete those that stay make another group. If no round comes in time,
a replica leaves between two: it asks once more, as one that has left, and waits for no answer; its question is in the
others' next quorum, who so do not wait for it.

[Note: one question for two rounds]
One that has broken off a round which turns out to be complete asks while others are at the next round. Their answer is
one of both: it does not ask again before the next one. Until then it has the share of the data that the others had
meanwhile: also that among those with one that they have taken in, and that was lost while this one did so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from lightning_pipesync.core.comm.line import is_open, open_store
from lightning_pipesync.core.faults.agreement import Agreement, agree
from lightning_pipesync.core.faults.errors import is_lost_peer
from lightning_pipesync.core.faults.lighthouse import SILENCE_S, Lighthouse, Standing
from lightning_pipesync.core.faults.notice import Notice
from lightning_pipesync.core.jobs import join_address, own_address, split_address
from lightning_pipesync.data.elastic import check_common
from lightning_pipesync.methods.replicas.membership import Membership, ids_of, listed

if TYPE_CHECKING:
    from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod
    from lightning_pipesync.methods.replicas.membership import Snapshot

#: Seconds that others are waited for which seem to live, though the lighthouse counts them as lost.
LATE_S = 2 * SILENCE_S

#: Seconds between two questions while there are fewer replicas than training begins with.
ASK_S = 0.1

#: What all ranks of a job agree on at each step; of several wishes the last one counts.
STAYS, AFTER_ROUND, NOW = range(3)

#: Seconds of a step, at least, when it is foretold how many there will be.
SHORTEST_STEP_S = 1e-3


class LeftOutError(RuntimeError):
    """The others have continued without this replica."""


class QuorumRounds:
    """Runs the rounds of a method, with the replicas of each quorum; see the notes of this module.

    Attributes:
        job: this job's ranks.
        lighthouse: on the first of them.
        id: of this replica among all others.
        completed: the number of rounds so far.
        took_part: the ids of the replicas whose data the last of them has; empty: this one was not among them.
        members: the ids of the replicas that are there after it, those that are new, too: all that have last met.
        left: the ids of those that have left in order with it.
        generation: of the last quorum.
        has_joined: whether this replica is one of those that train.
        has_left: whether it was asked to leave, and has; all ranks of the job have then.

    Args:
        method: attached.
        lighthouse: ``host:port``.
        num_replicas: the number of replicas that training begins with.
        timeout_s: seconds after which a replica, or a lighthouse, that does not answer counts as lost.

    Raises:
        RuntimeError: the lighthouse does not answer.
    """

    def __init__(self, method: ElasticReplicaMethod, lighthouse: str, num_replicas: int, timeout_s: float) -> None:
        self._method, self._num_replicas, self._timeout = method, num_replicas, timedelta(seconds=timeout_s)
        self.job = method.transport.new_objects()
        self._store = open_store()
        stores = self.job.gather_objects(join_address(own_address(*split_address(lighthouse)), self._store.port))
        self.lighthouse = Lighthouse(lighthouse, stores, timeout_s) if self.job.rank == 0 else None
        self.id: str = self.job.broadcast_object(self.lighthouse and self.lighthouse.id)
        self.completed, self.generation, self.has_joined, self.has_left = 0, "", False, False
        self.took_part: list[str] = []
        self.left: list[str] = []
        self._shared_by: tuple[str, ...] = ()  # the data
        self._steps: tuple[int, tuple[str, ...]] = -1, ()  # what a standing tells of the last steps
        self._was_silent = False  # when it has asked last
        self._missing_since: dict[str, float] = {}  # the times since when it has missed others, by id
        self._membership = Membership(method, self.id, self.job, self._timeout)
        self._next: Agreement | None = None  # which is one of the next round, too
        self._gathered: Snapshot | None = None  # in a round with which some leave

    @property
    def members(self) -> list[str]:
        return ids_of(self._membership.members)

    def join(self) -> None:
        """Joins the others before the first step; waits until they can take this replica in.

        Raises:
            RuntimeError: there are too few replicas to begin with; or the lighthouse does not answer.
            ValueError: this replica has other settings, or another model.
        """
        begin, self.completed = time.monotonic(), self._method.num_steps  # the latest checkpoint begins
        while not self.has_joined:
            agreement = self._agree()
            if agreement is None or not agreement.staying:
                continue  # nobody stays who could take this replica in
            starts = all(member.standing.joins for member in agreement.members)
            if starts and len(agreement.members) < self._num_replicas:
                self._wait_for_more(agreement, begin)
                continue
            if self._attempt(agreement, partial(self._join, agreement)):
                # Others have completed a round before they take new ones in.
                self.completed, self.generation = agreement.completed + (not starts), agreement.generation
                self.has_joined, self._steps = True, (self.completed, self._shared_by)
                self._membership.announces = self.job.rank == 0
                if not starts:
                    self._method.data.skip_ended_epochs()

    def end(self, round_: Callable[[], object]) -> None:
        """Runs a last round if all others end, after no more steps; otherwise they go on without this replica."""
        self.go_on()
        try:
            self.run(round_, self._method.snapshot(), ends=True)
        except LeftOutError:
            if self._was_silent:
                raise

    def leave_now(self) -> None:
        """Leaves for good, between two rounds; what the others are still to receive is on its way."""
        self.has_left = True
        self._tell_goodbye()

    def run(
        self,
        round_: Callable[[], object],
        before: Snapshot,
        asks: bool = True,
        ends: bool = False,
        leaves_by: float | None = None,
    ) -> None:
        """Runs a round, again after each loss that has kept a replica from completing it.

        Args:
            round_: communicates.
            before: the state of the method now, as far as the round may change it.
            asks: whether to ask who takes part, the same on all replicas; False: those of the last round.
            ends: whether this is the last round.
            leaves_by: this replica, which asks, leaves with this round, or without it if the others have not come by
                this time, of ``time.monotonic``; None: it stays.

        Raises:
            LeftOutError: the others have continued without this replica.
            RuntimeError: the lighthouse does not answer.
            ValueError: this replica divides other data than the others.
        """
        number = self.completed + 1
        is_final = is_repeated = False
        last, self.left = -1 if leaves_by is None else number, []
        while True:
            undoable = self.completed == number and not is_final
            unasked = None  # those of the last round take part, unless this replica asks
            if not (asks or is_repeated) and self._membership.is_connected:
                unasked = Agreement(self._membership.members, [], self.completed, True, self.generation)
            deadline = math.inf if leaves_by is None or is_repeated else leaves_by
            agreement = self._next or unasked or self._agree(undoable, ends, last, deadline)
            self._next = None
            if agreement is None or self.id in ids_of(agreement.gone):
                self.leave_now()
                return
            if agreement is not unasked and self._was_left_behind(agreement):
                self.close()
                raise LeftOutError(
                    "This replica did not answer in time, and the others have continued without it: its weights are "
                    "out of date. End this process, and start it again: it then gets theirs."
                )
            self._check_data(agreement)
            stands = agreement.completed == number
            if is_repeated and not stands:
                self._method.undo_averages()
            if agreement.changes and not stands:
                before = self._method.completed(before)  # then averages under way arrive, too
            self.completed, self.generation, is_repeated = agreement.completed, agreement.generation, True
            awaits = agreement is not unasked and self._awaits_missing(agreement)
            go_on = partial(self._membership.go_on, agreement, None if stands else before)
            if awaits or not self._attempt(agreement, go_on):
                is_final |= stands
                continue
            if stands:
                self._next = agreement
                self._divide_as_others(agreement)
                break
            if self._attempt(agreement, partial(self._complete, agreement, round_)):
                self.completed, self.took_part = number, self.members
            if self.completed == number and self._attempt(agreement, self._membership.commit):
                is_final = True
                if self.id in ids_of(agreement.leaving):
                    self.leave_now()
                    return
                if not agreement.changes:
                    self._attempt(agreement, self._method.launch)  # the next round finds out that one is lost
                    break
                if self._attempt(agreement, partial(self._take_in, agreement)):
                    break
        self._steps = self.completed, self._shared_by

    def go_on(self) -> None:
        """Has the method send new replicas the rest, as training goes on; the next round finds out if one is lost."""
        if self.lighthouse is not None:
            self.lighthouse.go_on()
        try:
            self._method.send_rest()
        except RuntimeError as error:
            if not is_lost_peer(error) or not self._membership.is_connected:
                raise
            self._membership.disconnect()

    def close(self, ends_waits: bool = True) -> None:
        """Leaves: the others need not wait for this replica; by default ends all waits for them, too."""
        if self.lighthouse is not None:
            self.lighthouse.close()
        if ends_waits:
            self._membership.disconnect()

    def _agree(
        self, undoable: bool = False, ends: bool = False, last: int = -1, deadline: float = math.inf
    ) -> Agreement | None:
        """Asks for a quorum, on the first rank of the job, and returns what it agrees on, on all of them.

        Returns None if there is none by ``deadline``.
        """
        standing = Standing(
            self.completed,
            self.generation,
            undoable,
            self._membership.is_connected,
            not self.has_joined,
            ends,
            self._method.steps_of_optimizers,
            *self._steps,
            data=self._method.data.common(),
            last=last,
        )
        quorum = None if self.lighthouse is None else self.lighthouse.ask(standing, deadline)
        was_silent = self.lighthouse and self.lighthouse.was_silent
        quorum, self._was_silent = self.job.broadcast_object((quorum, was_silent))
        return None if quorum is None else agree(quorum)

    def _tell_goodbye(self) -> None:
        if self.lighthouse is not None:
            self.lighthouse.leave(Standing(self.completed, self.generation, last=self.completed))

    def _check_data(self, agreement: Agreement) -> None:
        """Raises a ValueError if this replica divides other data than the first one."""
        first = agreement.continuing[0]
        try:
            for here, there in zip(self._method.data.common(), first.standing.data, strict=False):
                check_common(here, there)
        except ValueError:
            self._tell_goodbye()
            self.close()
            raise

    def _was_left_behind(self, agreement: Agreement) -> bool:
        """Returns whether the others have trained on without this replica, or may have, as most are missing.

        It was silent then, and would train on to other weights than theirs.
        """
        if self.id not in ids_of(agreement.continuing):
            return True
        missing = self._membership.missing(agreement)
        if 2 * len(missing) < len(self.members) or not missing:
            if self.lighthouse is not None:
                self.lighthouse.was_silent = False
            return False
        return self._was_silent

    def _awaits_missing(self, agreement: Agreement) -> bool:
        """Returns, after a moment, whether to ask again: some who are missing live, and may only be late.

        Otherwise they would be left out, or go on apart from this replica, to other weights. One that is frozen seems
        to live, too: each is awaited for some seconds only.
        """
        missing, now = self._membership.missing(agreement), time.monotonic()
        self._missing_since = {member.id: self._missing_since.get(member.id, now) for member in missing}
        if not missing:
            return False
        awaited_s = min(LATE_S, self._timeout.total_seconds())
        late = [member for member in missing if now - self._missing_since[member.id] < awaited_s]
        lives = bool(late) and self.job.rank == 0 and is_open([member.stores[0] for member in late])
        if not any(self.job.gather_objects(lives)):
            return False
        self._membership.decline(agreement)
        time.sleep(ASK_S)
        return True

    def _wait_for_more(self, agreement: Agreement, begin: float) -> None:
        if time.monotonic() - begin > self._timeout.total_seconds():
            raise RuntimeError(
                f"Training begins with num_replicas={self._num_replicas}, and after "
                f"timeout_s={self._timeout.total_seconds():g} there are {len(agreement.members)}: "
                f"{listed(agreement.members)}. The others have ended, or have not started: start them, or set a "
                "smaller num_replicas."
            )
        time.sleep(ASK_S)

    def _attempt(self, agreement: Agreement, part: Callable[[], object]) -> bool:
        """Runs a part of a round; returns whether no rank of this job has lost a replica; else ends the group."""
        lost = None
        try:
            part()
        except BaseException as error:
            if not (isinstance(error, RuntimeError) and is_lost_peer(error)):
                self.close()
                raise
            lost = error
            self._membership.break_off()
        if all(self.job.gather_objects(lost is None)):
            return True
        self._membership.break_off()
        self._membership.give_up(agreement)
        return False

    def _join(self, agreement: Agreement) -> None:
        is_first = self.id in ids_of(agreement.continuing)
        if is_first:
            self._membership.go_on(agreement)
        if agreement.new:
            self._take_in(agreement)
        if is_first:
            self._method.send_rest()
            self._divide()
        else:
            self._method.receive_rest(ids_of(agreement.members).index(agreement.staying[0].id))

    def _complete(self, agreement: Agreement, round_: Callable[[], object]) -> None:
        self._divide()
        round_()
        self._gathered = None
        if agreement.changes:
            self._method.launch(waits=True)
        if agreement.leaving and agreement.staying:
            keeper = ids_of(agreement.continuing).index(agreement.staying[0].id)
            self._gathered = self._method.gathered_snapshot(keeper)

    def _take_in(self, agreement: Agreement) -> None:
        """Makes a group of those that stay and those that are new, and hands over to these what the former know."""
        snapshot, self._gathered = self._gathered or self._method.snapshot(), None
        self._membership.connect(agreement, snapshot, takes_in=True)
        self.left = ids_of(agreement.leaving)
        self._divide()

    def _divide(self, among: Sequence[str] = ()) -> None:
        """Divides the data among these ids, or the members of the line."""
        shared_by = tuple(among or self.members)
        self._method.data.redivide((shared_by.index(self.id), len(shared_by)))
        self._shared_by = shared_by

    def _divide_as_others(self, agreement: Agreement) -> None:
        """Divides the data as those have done who have gone on after the round; if there are none, among its members.

        They may have taken in one that this replica has not.
        """
        ahead = [one.standing for one in agreement.continuing if one.standing.steps_after == agreement.completed]
        together = [one for one in self.took_part if one not in ids_of(agreement.gone)]
        self._divide(ahead[0].shared_by if ahead else together)


class Departure:
    """Decides at which step a replica leaves, on all ranks of its job, of which any may have been asked.

    One that leaves after a round loses nothing, so it trains on until then, if there is time.

    Args:
        greatest: returns the greatest of the numbers of all ranks of the job, each of which gives it one.

    Attributes:
        notice: by which this rank is asked.
        is_now: whether the replica leaves at the end of this step, and the next round would come too late.
    """

    def __init__(self, greatest: Callable[[int], int]) -> None:
        self.notice, self.is_now = Notice(), False
        self._greatest = greatest
        self._agreed = STAYS
        self._began = time.monotonic()  # the present step

    @property
    def deadline(self) -> float | None:
        """The time, of ``time.monotonic``, by which it leaves, with a round if one has begun; None: it stays."""
        return self.notice.deadline if self._agreed else None

    def begin_step(self, starts_in: Callable[[int], bool]) -> None:
        """Agrees with the other ranks of the job at a step; ``starts_in(n)``: a round may start at the nth's end."""
        now = time.monotonic()
        step_s, self._began = max(SHORTEST_STEP_S, now - self._began), now
        wish = STAYS
        if self.notice.deadline is not None:
            in_time = 1 + int(max(0.0, self.notice.deadline - now) / step_s)  # at least the one that may be due now
            wish = AFTER_ROUND if any(starts_in(steps) for steps in range(1, 1 + in_time)) else NOW
        self._agreed = self._greatest(wish)
        self.is_now = self._agreed == NOW
        if self._agreed:
            self.notice.give()
