"""Which replicas average with each other in a round, if not all do (gossip), and how fast they come together.

A round replaces the weights x_i of replica i by sum_j W_ij x_j. W is a doubly stochastic mixing matrix: the average of
all replicas stays what it is, and each of them comes nearer to it. Here all weights in a row of W that are not zero are
equal.

[Note: the order of D-PSGD]
A step of D-PSGD (Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
Algorithm 1) is X_{k+1} = X_k W - gamma dF(X_k): the gradient is that of the weights before the average, and changes
the weights after it. That is ``period=1, overlap_steps=1`` with ``mixing_factor="progress"``: the average of x_k runs
while the gradient at x_k is computed. With ``overlap_steps=0`` a round ends a step, as in all local SGD:
X_{k+1} = (X_k - gamma dF(X_k)) W. The average of all replicas moves by the mean of their steps in either order.
"""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import numpy as np

Neighbors = Literal["all", "ring", "random_pairs"]


def neighborhood(neighbors: Neighbors, replica: int, number: int, round_: int) -> list[int]:
    """Returns whose weights a replica averages in a round, in order: its neighbors and itself.

    Random pairs are drawn anew in each round, the same on all ranks; of an odd number one replica is left alone.

    Args:
        replica: the replica, in ``range(number)``.
        number: the number of replicas.
        round_: the number of the round, from which pairs are drawn.
    """
    if neighbors == "all":
        return list(range(number))
    if neighbors == "ring":
        return sorted({(replica + step) % number for step in (-1, 0, 1)})
    order = Random(round_).sample(range(number), number)
    place = order.index(replica)
    return sorted(order[place // 2 * 2 :][:2])


def mixing_matrix(neighbors: Neighbors, number: int, round_: int = 0) -> np.ndarray:
    """Returns W of a round, of shape ``[number, number]``."""
    matrix = np.zeros((number, number))
    for replica in range(number):
        members = neighborhood(neighbors, replica, number, round_)
        matrix[replica, members] = 1 / len(members)
    return matrix


def contraction(neighbors: Neighbors, number: int) -> float:
    """Returns the factor by which a round shrinks the spread of the replicas: 0 if they are equal afterwards.

    The spread is the root of the mean squared distance of the replicas to their average. On a ring this is the second
    largest eigenvalue of W in magnitude, which the factor of each round approaches and never exceeds. For random pairs
    it is the root of the second largest eigenvalue of E[W'W] (Boyd et al., "Randomized Gossip Algorithms", 2006), which
    is that of E[W], as W W = W: the mean over draws of the squared factor, for any weights, since a pair is drawn with
    the same probability as any other. 1 minus it is the spectral gap.
    """
    if len(neighborhood(neighbors, 0, number, 0)) == number:
        return 0.0
    if neighbors == "ring":  # the eigenvalues are (1 + 2 cos(2 pi k / number)) / 3, and -1/3 at least
        return (1 + 2 * math.cos(2 * math.pi / number)) / 3
    # W_ij is 1/2 with the probability of that pair: 1 / (number - 1), of an odd number 1 / number.
    return math.sqrt(0.5 if number % 2 else (number - 2) / (2 * (number - 1)))
