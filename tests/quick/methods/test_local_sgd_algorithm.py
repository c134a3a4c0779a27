"""When which fragment is averaged, and among whom."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_pipesync.methods.local_sgd.clock import Rounds, epochs_of, steps_of
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.replicas.fragments import divide_layers
from lightning_pipesync.methods.replicas.unit import number_of_participants, participants


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("period", [1, 4, 7])
def test_each_fragment_is_averaged_once_in_a_period(fragments: int, period: int) -> None:
    rounds = Rounds(period, fragments)
    for begin in (1, period + 1):
        started = [rounds.started(step) for step in range(begin, begin + period)]
        assert sum(started) == fragments
        assert started[-1] > 0, "the last one at the end of the period"
        assert max(started) - min(started) <= 1 or fragments > period


def test_fragments_are_at_equal_distances() -> None:
    rounds = Rounds(12, 4)
    assert [(step, rounds.started(step)) for step in range(1, 13) if rounds.started(step)] == [
        (3, 1),
        (6, 1),
        (9, 1),
        (12, 1),
    ]


@pytest.mark.parametrize(
    ("period", "epochs"),
    [("0.25 epoch", 0.25), ("0.25epoch", 0.25), (".5 epoch", 0.5), ("5 epochs", 5.0), (7, None), ("selsync", None)],
)
def test_a_period_in_epochs(period: int | str, epochs: float | None) -> None:
    assert epochs_of(period) == epochs


@pytest.mark.parametrize("period", [0, -3, 2.5, True, "0 epochs", "epoch", "4", "4 steps", "nan epoch", "-1 epoch", ""])
def test_what_is_no_period(period: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {period!r}")):
        LocalSGDConfig(period=period)


@pytest.mark.parametrize(
    ("period", "steps_per_epoch", "steps"), [("0.25 epoch", 19, 5), ("0.01 epoch", 19, 1), ("2 epochs", 19, 38)]
)
def test_the_steps_of_a_period_in_epochs(period: str, steps_per_epoch: int, steps: int) -> None:
    assert steps_of(period, steps_per_epoch) == steps
    with pytest.raises(ValueError, match="prepare_train_loader"):
        steps_of(period, None)


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
    assert divide_layers(sizes, fragments) == expected
