"""Rounds, whatever befalls replicas at any point of the protocol: all that continue have the same rounds."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.replica_world import EVENTS, World

SEEDS, ROUNDS = 300, 5
#: Of worlds in which some have taken in a replica that dies before all others have.
RARE = (762, 866, 1070, 1559)
#: How a process may end: none waits for ever, trains on alone, or ends without a word.
ENDS = {"done", "killed", "left", "left out", "too few"}


def ends_of(world: World, seed: int) -> Counter[str]:
    """Runs a world; returns how many of its processes have ended in each way, of which the survivor has in order."""
    try:
        world.run()
    except AssertionError as error:
        pytest.fail(f"seed {seed}: {error}")
    ends = Counter(process.outcome for process in world.processes)
    assert ends.keys() <= ENDS, (seed, [(process.id, process.outcome) for process in world.processes])
    survivor = world.survivor
    if not world.late:  # otherwise the others may have counted it as lost
        assert survivor.outcome == ("done" if survivor.joined else "too few"), seed  # the others were lost before
        members = survivor.method.rounds[-1] if survivor.joined else ()
        assert all(each.outcome != "too few" for each in world.processes if each.id in members), seed
    return ends


@pytest.mark.parametrize("late", [False, True], ids=["", "signs of life come late"])
def test_all_that_continue_have_the_same_rounds(late: bool) -> None:
    """Also if the lighthouse counts one as lost that lives: the others wait for it, or it learns that it was left out.

    The rounds, and the place in the data, are compared by the world, after each round.
    """
    ends: Counter[str] = Counter()
    for seed in (*range(SEEDS), *([] if late else RARE)):
        world = World(seed, 2 + seed % 3, ROUNDS, faults=seed % 7, unasked=seed // 21 % 4, late=late)
        ends += ends_of(world, seed)
    assert ends["done"] > 2 * SEEDS, "most replicas go on, and new ones are taken in"
    assert ends.keys() == ENDS, ends
    assert late or min(ends.values()) > SEEDS // 40, ends


@pytest.mark.parametrize("what", EVENTS)
def test_whatever_befalls_one_of_them_in_any_turn(what: str) -> None:
    """Until the training ends before it."""
    turn, ends = 0, Counter[str]()
    while True:
        turn += 1
        world = World(turn, 3, num_rounds=2, unasked=turn % 2, at=(turn, what))
        ends += ends_of(world, turn)
        if world.turns < turn:
            break
    assert turn > 40, "it has befallen one in each part of the protocol"
    assert ends[{"dies": "killed", "dies and comes": "killed", "leaves": "left"}.get(what, "done")] > turn / 2, ends
