"""The mixing matrices of replicas that average with neighbors, and how fast these come together."""

from __future__ import annotations

from itertools import permutations
from typing import get_args

import numpy as np
import pytest

from lightning_pipesync.methods.replicas.neighbors import Neighbors, contraction, mixing_matrix, neighborhood

ROUNDS = range(200)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("neighbors", get_args(Neighbors))
def test_matrices_are_doubly_stochastic(neighbors: Neighbors, number: int) -> None:
    """And symmetric: a replica's neighbors have it as theirs, without which one would wait for ever."""
    for round_ in ROUNDS[:20]:
        matrix = mixing_matrix(neighbors, number, round_)
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
        np.testing.assert_array_equal(matrix, matrix.T)
        assert (matrix >= 0).all()
        assert (matrix.diagonal() > 0).all()


def test_who_the_neighbors_are() -> None:
    assert [neighborhood("ring", replica, 5, 0) for replica in (0, 2)] == [[0, 1, 4], [1, 2, 3]]
    assert [neighborhood("ring", replica, 2, 0) for replica in (0, 1)] == [[0, 1], [0, 1]]
    assert neighborhood("all", 1, 4, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [4, 5])
def test_pairs_are_drawn_anew_in_each_round(number: int) -> None:
    drawn = [[tuple(neighborhood("random_pairs", r, number, round_)) for r in range(number)] for round_ in ROUNDS]
    assert all(sum(len(pair) == 1 for pair in pairs) == number % 2 for pairs in drawn), "one is left out, or none"
    partners = {pair for pairs in drawn for pair in pairs if len(pair) == 2}
    assert len(partners) == number * (number - 1) / 2, "every pair"
    assert {pair[0] for pairs in drawn for pair in pairs if len(pair) == 1} == (set(range(5)) if number == 5 else set())


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8, 64])
def test_a_ring_contracts_by_the_second_eigenvalue(number: int) -> None:
    magnitudes = np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix("ring", number))))[::-1]
    second = magnitudes[1] if number > 1 else 0.0
    assert contraction("ring", number) == pytest.approx(second, abs=1e-12)
    if number > 3:
        assert contraction("ring", number) == pytest.approx((1 + 2 * np.cos(2 * np.pi / number)) / 3)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_pairs_contract_by_the_mean_over_all_draws(number: int) -> None:
    """Of all orders in which replicas can be drawn: the mean squared distance to the average, for any weights."""
    weights = np.random.default_rng(0).standard_normal(number)
    weights -= weights.mean()
    squares = []
    for order in permutations(range(number)):
        mixed = weights.copy()
        for first, second in zip(order[::2], order[1::2], strict=False):
            mixed[[first, second]] = (weights[first] + weights[second]) / 2
        squares.append((mixed**2).sum())
    expected = np.mean(squares) / (weights**2).sum() if number > 1 else 0.0
    assert contraction("random_pairs", number) ** 2 == pytest.approx(expected)


def test_all_are_equal_at_once() -> None:
    assert contraction("all", 8) == 0
