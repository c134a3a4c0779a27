"""What the replicas of a quorum agree on, by where each stands: tables of what may have befallen them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipesync.core.faults.agreement import Agreement, agree
from lightning_pipesync.core.faults.lighthouse import Member, Quorum, Standing

#: Generations: of the last quorum, and of the one before.
LAST, BEFORE = "00000008/000000000001.000000000", "00000007/000000000009.000000000"


def at(completed: int, generation: str = LAST, last: int = -1, **more: Any) -> Standing:
    return Standing(completed, generation, connected=more.pop("connected", True), last=last, **more)


def new(completed: int = 0) -> Standing:
    return Standing(completed, joins=True)


def outcome(*standings: Standing) -> Agreement:
    """Returns what replicas with these standings agree on; their ids are a, b, ..."""
    members = [Member(chr(ord("a") + i), "host", 1, ["host:1"], each) for i, each in enumerate(standings)]
    return agree(Quorum(members, "next"))


#: By what has befallen them: where each stands; who continues; the rounds that are complete; whether they still have
#: a group.
TABLE: dict[str, tuple[list[Standing], str, int, bool]] = {
    "nothing": ([at(3), at(3), at(3)], "abc", 3, True),
    "another is lost before the data": ([at(3, connected=False), at(3, connected=False)], "ab", 3, False),
    "one is behind, the round is undone": ([at(4, undoable=True), at(3, connected=False)], "ab", 3, False),
    "two are behind": ([at(3), at(4, undoable=True), at(3)], "abc", 3, True),
    "all have it, none knows": ([at(4, undoable=True), at(4, undoable=True)], "ab", 4, True),
    "one knows that all have it": ([at(4), at(4, undoable=True, connected=False)], "ab", 4, False),
    "one is at the next round already": ([at(4, undoable=True, connected=False), at(4), at(4)], "abc", 4, False),
    "one is behind, and another cannot undo it": ([at(4), at(4, undoable=True), at(3)], "ab", 4, True),
    "one is two rounds behind": ([at(5, undoable=True), at(3)], "a", 5, True),
    "one was left out": ([at(3), at(3), at(3, BEFORE)], "ab", 3, True),
    "one left out has undone nothing, the others have": ([at(2), at(2), at(3, BEFORE, undoable=True)], "ab", 2, True),
    "one left out is further by its own count": ([at(9, BEFORE), at(3)], "b", 3, True),
    "one of two that were left out is alone": ([at(3, BEFORE)], "a", 3, True),
    "one comes": ([at(3), new(), at(3)], "ac", 3, True),
    "one comes, and its checkpoint is of later": ([at(3), new(7)], "a", 3, True),
    "one comes as another is lost": ([new(), at(3, connected=False), at(3, connected=False)], "bc", 3, False),
    "one comes as a round is undone": ([new(), at(3), at(4, undoable=True)], "bc", 3, True),
    "all are new": ([new(), new(), new()], "a", 0, False),
    "all are new, from checkpoints of different age": ([new(2), new(5), new(5)], "b", 5, False),
    "one of the new ones has begun": ([new(), at(0, "00000001/1", joins=True), new()], "b", 0, True),
    "one ends, and the others go on": ([at(3, ends=True), at(3), at(3)], "bc", 3, True),
    "all end": ([at(3, ends=True), at(3, ends=True)], "ab", 3, True),
    "all end, one after fewer steps": ([at(3, ends=True, steps=[n]) for n in (9, 8, 9)], "ac", 3, True),
    "all end, one after fewer steps of an optimizer": ([at(3, ends=True, steps=[9, n]) for n in (3, 4)], "b", 3, True),
    "all end, and the round is undone": (
        [at(4, ends=True, steps=[9], undoable=True), at(3, ends=True, steps=[9])],
        "ab",
        3,
        True,
    ),
    "all but one are lost": ([at(4, undoable=True, connected=False)], "a", 4, False),
}


@pytest.mark.parametrize("befallen", TABLE)
def test_who_continues_from_where(befallen: str) -> None:
    standings, continuing, completed, connected = TABLE[befallen]
    agreement = outcome(*standings)
    assert "".join(member.id for member in agreement.continuing) == continuing
    joining = {chr(ord("a") + i) for i, each in enumerate(standings) if each.joins}
    assert {member.id for member in agreement.new} == joining - set(continuing), "nobody waits for those left out"
    assert [member.id for member in agreement.members] == sorted(joining | set(continuing))
    assert (agreement.completed, agreement.connected, agreement.generation) == (completed, connected, "next")


#: By what has befallen them: where each stands; who continues, leaves, and has left; and who is there then.
LEAVING: dict[str, tuple[list[Standing], str, str, str, str]] = {
    "one leaves with the next round": ([at(3), at(3, last=4), at(3)], "abc", "b", "", "ac"),
    "another one comes": ([at(3), at(3, last=4), new()], "ab", "b", "", "ac"),
    "it is behind, and the round is undone": ([at(4, undoable=True), at(3, last=4)], "ab", "b", "", "a"),
    "it does not know yet that all have it": ([at(4), at(4, last=4, undoable=True)], "a", "", "b", "a"),
    "one has left between two rounds": ([at(3), at(3), at(3, last=3)], "ab", "", "c", "ab"),
    "one has left before the first round": ([at(0), at(0, last=0)], "a", "", "b", "a"),
    "all leave": ([at(3, last=4), at(3, last=4)], "ab", "ab", "", ""),
    "all have left, and one comes": ([at(3, last=3), new(), new()], "b", "", "", "bc"),
    "one ends, and another one has left": ([at(3, ends=True), at(3, last=3)], "a", "", "b", "a"),
}


@pytest.mark.parametrize("befallen", LEAVING)
def test_who_leaves(befallen: str) -> None:
    standings, *expected = LEAVING[befallen]
    agreement = outcome(*standings)
    groups = agreement.continuing, agreement.leaving, agreement.gone, agreement.members
    assert ["".join(member.id for member in group) for group in groups] == expected


def test_later_generations_sort_behind_earlier_ones() -> None:
    """By their number, also when a clock was set back, and by the time among those of the same number."""
    generations = ["", "00000009/000000000001.999999999", "00000009/000000000002.0", "00000010/000000000001.0"]
    assert sorted(generations) == generations
