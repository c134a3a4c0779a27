"""What the replicas of a quorum agree on: who continues from where, and who gets what the others know.

[Note: agreement by standings]
The replicas pass through numbered rounds, in each of which some average starts or is applied. Each completes a round
when it has all others' data of it, and then tells them so. A replica that has this word from all others goes on. One
that misses it, or the data, breaks off, and asks for another quorum. There all know where each stands, and come to the
same conclusion without another message:

- Those of the latest quorum continue. No others can know as much, as each round needs all replicas of its quorum.
- If one of them misses data of the last round, nobody has gone on, and all undo it. Otherwise it stands.
- Others that are about to begin are new, also one that has been loaded from a checkpoint. Nobody waits for the rest:
  those that were left out while they were frozen.

One that ends leaves, unless all end: then those that have taken the most steps have a last round together. One that
was asked to leave tells with which round it does: that is still of all, and those that stay make another group at its
end.

If all are new, the one that has completed the most rounds begins, the first of several, and the others get its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_pipesync.core.faults.lighthouse import Member, Quorum


@dataclass(frozen=True)
class Agreement:
    """The outcome of a quorum; ids are those of its members."""

    continuing: list[Member]  # those of the next round, in the order of their ids
    new: list[Member]
    completed: int  # the number of rounds that are complete
    connected: bool  # whether all that continue still have a group with each other
    generation: str
    leaving: list[Member] = field(default_factory=list)  # those that continue for this round only
    gone: list[Member] = field(default_factory=list)  # those that have left before it

    @property
    def staying(self) -> list[Member]:
        """Those that go on after the next round; the first one hands over what it knows."""
        return [member for member in self.continuing if member not in self.leaving]

    @property
    def changes(self) -> bool:
        """Whether some come or leave at the end of the next round."""
        return bool(self.new or self.leaving)

    @property
    def members(self) -> list[Member]:
        """Those that go on after the next round, with those that are new, in the order of their ids."""
        return sorted([*self.staying, *self.new], key=lambda member: member.id)


def agree(quorum: Quorum) -> Agreement:
    """Returns what a quorum's members agree on, see [Note: agreement by standings]."""
    latest = max(member.standing.generation for member in quorum.members)
    of_latest = [member for member in quorum.members if member.standing.generation == latest]
    most = max(member.standing.completed for member in of_latest)
    ahead = [member for member in of_latest if member.standing.completed == most]
    if not latest:
        continuing = ahead[:1]
    elif _undone(of_latest, ahead, most):
        continuing, most = of_latest, most - 1
    else:
        continuing = ahead
    gone = [member for member in continuing if 0 <= member.standing.last <= most]
    if gone == continuing and gone != quorum.members:  # what they knew has left with them
        return agree(Quorum([member for member in quorum.members if member not in gone], quorum.generation))
    continuing = [member for member in continuing if member not in gone]
    going_on = [member for member in continuing if not member.standing.ends]
    continuing = going_on or _with_most_steps(continuing)
    return Agreement(
        continuing=continuing,
        leaving=[member for member in continuing if member.standing.last > most],
        gone=gone,
        new=[member for member in quorum.members if member.standing.joins and member not in continuing],
        completed=most,
        connected=all(member.standing.connected for member in continuing),
        generation=quorum.generation,
    )


def _with_most_steps(members: Sequence[Member]) -> list[Member]:
    most = max((member.standing.steps for member in members), default=[])
    return [member for member in members if member.standing.steps == most]


def _undone(of_latest: Sequence[Member], ahead: Sequence[Member], most: int) -> bool:
    """Returns whether the last round is undone: some miss its data, and the others can undo it."""
    behind = [member for member in of_latest if member not in ahead]
    return bool(behind) and (
        all(member.standing.completed == most - 1 for member in behind)
        and all(member.standing.undoable for member in ahead)
    )
