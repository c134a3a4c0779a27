"""When which fragment is averaged, and among whom."""

from __future__ import annotations

import pytest

from lightning_pipesync.methods.local_sgd.algorithm import Rounds, in_fragments, number_of_participants, participants


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("period", [1, 4, 7])
@pytest.mark.parametrize("overlap", [0, 1])
def test_each_fragment_is_averaged_once_in_a_period(fragments: int, period: int, overlap: int) -> None:
    rounds = Rounds(period, fragments, overlap)
    for begin in (1, period + 1):
        started = [f for step in range(begin, begin + period) for f in rounds.started(step)]
        assert sorted(started) == list(range(fragments))
    assert fragments - 1 in rounds.started(period), "the last one at the end of the period"
    for step in range(1, 3 * period):
        assert rounds.started(step) == rounds.applied(step + overlap)


def test_fragments_are_at_equal_distances() -> None:
    rounds = Rounds(12, 4)
    assert [(step, rounds.started(step)) for step in range(1, 13) if rounds.started(step)] == [
        (3, [0]),
        (6, [1]),
        (9, [2]),
        (12, [3]),
    ]


def test_participants_are_drawn_anew_in_each_round() -> None:
    drawn = [tuple(participants(2, 5, round_)) for round_ in range(200)]
    assert all(len(set(ranks)) == 2 and set(ranks) <= set(range(5)) for ranks in drawn)
    assert len(set(drawn)) == 10, "every pair"
    assert drawn == [tuple(participants(2, 5, round_)) for round_ in range(200)]


@pytest.mark.parametrize(
    ("share", "world_size", "number"), [(1.0, 3, 3), (0.5, 4, 2), (0.1, 10, 1), (0.3, 3, 0), (0.7, 10, 7)]
)
def test_the_number_of_participants(share: float, world_size: int, number: int) -> None:
    assert number_of_participants(share, world_size) == number


@pytest.mark.parametrize(
    ("sizes", "fragments", "expected"),
    [
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([10, 1, 1], 3, [[0], [1], [2]]),
        ([1, 1, 10], 3, [[0], [1], [2]]),
        ([1, 1, 10], 2, [[0, 1], [2]]),
        ([5], 1, [[0]]),
    ],
)
def test_fragments_have_about_the_same_size(sizes: list[int], fragments: int, expected: list[list[int]]) -> None:
    assert in_fragments(sizes, fragments) == expected
