"""What the replicas of a quorum agree on: who continues from where, and who gets what the others know.

[Note: agreement by standings]
The replicas pass through numbered sections, such as a round. Each completes a section when it has all others' data of
it, and then tells them so. A replica that has this word from all others goes on. One that misses it, or the data,
breaks off, and asks for another quorum. There all know where each stands, and come to the same conclusion without
another message:

- Those of the latest quorum continue. No others can know as much, as each section needs all replicas of its quorum.
- If one of them misses data of the last section, nobody has gone on, and all undo it. Otherwise it stands.
- Others that are about to begin are new, also one that has been loaded from a checkpoint. Nobody waits for the rest:
  those that were left out while they were frozen.

One that ends leaves, unless all end, who then have a last section together.

If all are new, the one that has completed the most sections begins, the first of several, and the others get its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipesync.core.faults.lighthouse import Member, Quorum


@dataclass(frozen=True)
class Agreement:
    """The outcome of a quorum; ids are those of its members."""

    continuing: list[Member]  # in the order of their ids; the first one hands over what it knows
    new: list[Member]
    completed: int  # the number of sections that are complete
    connected: bool  # whether all that continue still have a group with each other
    generation: str

    @property
    def members(self) -> list[Member]:
        """All of them, in the order of their ids."""
        return sorted([*self.continuing, *self.new], key=lambda member: member.id)


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
    continuing = [member for member in continuing if not member.standing.ends] or continuing
    return Agreement(
        continuing=continuing,
        new=[member for member in quorum.members if member.standing.joins and member not in continuing],
        completed=most,
        connected=all(member.standing.connected for member in continuing),
        generation=quorum.generation,
    )


def _undone(of_latest: Sequence[Member], ahead: Sequence[Member], most: int) -> bool:
    """Returns whether the last section is undone: some miss its data, and the others can undo it."""
    behind = [member for member in of_latest if member not in ahead]
    return bool(behind) and (
        all(member.standing.completed == most - 1 for member in behind)
        and all(member.standing.undoable for member in ahead)
    )
